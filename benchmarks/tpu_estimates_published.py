"""Estimates beside figures that others published, one line each:

    python -m benchmarks.tpu_estimates_published --maxdiffusion .../custom_splash_attention.py

It needs libtpu, and minutes. The figures are of real TPUs, from the pages named beside them.
MaxDiffusion's kernel is compiled from its own source, which is given by a path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.tools.compile.job import CompileJob, run_in_child
from maxattn.tools.compile.process import ENVIRONMENT, tpu_python
from maxattn.tools.model_shapes import read

VMEM = "--xla_tpu_scoped_vmem_limit_kib=61440"
HEAD_DIM = 128
SHAPE = "1,32768,32768,12,128"  # no padding, so that no mask is evaluated
KV_BLOCKS = 37  # of 1,024 keys: the 37,800 of the published hop


class Anchor(NamedTuple):
    """Hold a kernel of MaxDiffusion's and what its pull request says of it.

    Args:
        fixed: a bound in place of a running maximum.
        scheduler: the compiler's experimental scheduler.
        blocks: q, kv, compute, compute_in; smaller than the published tile.
        published: TFLOP/s a core; None where there is none.
        source: where from.
    """

    fixed: bool
    scheduler: bool
    blocks: tuple[int, int, int, int]
    published: float | None
    source: str


_TILE = 2304, 1024, 1024, 1024
ANCHORS = (
    Anchor(False, True, _TILE, 646, "MaxDiffusion #452: 22.65 ms, tile 9472/1024, v7x"),
    Anchor(True, True, _TILE, 692, "MaxDiffusion #452: 21.15 ms, tile 6400/2048, v7x"),
    Anchor(False, False, _TILE, None, "the same without its scheduler"),
    Anchor(True, False, _TILE, None, "the same without its scheduler"),
)


class Ranking(NamedTuple):
    """Hold two tiles, and how much faster the second is said to be: time of one over the other."""

    target: str
    kernel: str
    slow: tuple[int, int, int]
    fast: tuple[int, int, int]
    published: str


RANKINGS = (
    Ranking("v6e:1x1", "flash", (512, 512, 512), (1024, 1024, 1024),
            "axlearn #958: a third faster"),
    Ranking("v6e:1x1", "flash", (512, 512, 512), (2048, 2048, 1024),
            "MaxDiffusion's YAMLs: 3024/2048/1024 in place of 512 on v6e"),
    Ranking("v5p:2x2x1", "flash", (512, 512, 512), (2048, 2048, 1024),
            "MaxDiffusion's YAMLs: 3024/2048/1024 in place of 512 on v5p"),
)  # fmt: skip


def main() -> None:
    """Print the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maxdiffusion", type=Path, help="its custom_splash_attention.py")
    parser.add_argument("--skip-rankings", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0, help="of one compile")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(_compile(ANCHORS[args.child], args.maxdiffusion, args.folder)))
        return
    for i, anchor in enumerate(ANCHORS if args.maxdiffusion else ()):
        print(_anchor(i, anchor, args), flush=True)
    for ranking in () if args.skip_rankings else RANKINGS:
        print(_ranking(ranking, args.seconds), flush=True)


def _anchor(i: int, anchor: Anchor, args: argparse.Namespace) -> str:
    """Compile in a process of its own, and write the estimate beside the figure."""
    what = "fixed-m" if anchor.fixed else "online"
    head = f"tpu7x {what}{', LP' if anchor.scheduler else ''} {'/'.join(map(str, anchor.blocks))}"
    with tempfile.TemporaryDirectory() as folder:
        words = ["--maxdiffusion", str(args.maxdiffusion), "--child", str(i), "--folder", folder]
        python = [tpu_python() or sys.executable, "-m", "benchmarks.tpu_estimates_published"]
        try:
            done = subprocess.run(
                [*python, *words], capture_output=True, timeout=args.seconds, check=True, text=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            return f"{head}: no estimate ({type(error).__name__})"
    slow, fast, libtpu = json.loads(done.stdout.splitlines()[-1])
    words = f"estimated by libtpu {libtpu}'s schedule, not run"
    return f"{head}: {slow:.0f} to {fast:.0f} TFLOP/s, {words}{_beside(anchor, slow, fast)}"


def _beside(anchor: Anchor, slow: float, fast: float) -> str:
    if anchor.published is None:
        return f" ({anchor.source})"
    ratios = f"{slow / anchor.published:.2f} to {fast / anchor.published:.2f} of it"
    return f"; published {anchor.published:g}, {ratios} ({anchor.source})"


def _compile(anchor: Anchor, source: Path, folder: Path) -> tuple[float, float, str]:
    """Return TFLOP/s, slow and fast end, of full tiles."""
    from maxattn.devices import DEVICES
    from maxattn.tools.estimate.program import dump_flags, estimate_of

    os.environ.update(ENVIRONMENT)
    os.environ["LIBTPU_INIT_ARGS"] = f"{VMEM} {dump_flags(folder)}"
    text = _lowered(anchor, source)
    made = estimate_of(text, folder, DEVICES["TPU v7x"], {})
    (kernel,) = made["kernels"]
    core = DEVICES["TPU v7x"].core
    assert core is not None
    work = 4.0 * anchor.blocks[0] * anchor.blocks[1] * HEAD_DIM * core.clock
    fast, slow = (work / cycles / 1e12 for cycles in kernel["cycles"])
    return slow, fast, made["libtpu"]


def _lowered(anchor: Anchor, source: Path) -> str:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    spec = util.spec_from_file_location("custom_splash_attention", source)
    assert spec and spec.loader, source
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    devices = topologies.get_topology_desc("tpu7x:2x2x1", "tpu").devices
    mesh = Mesh(devices[:1], ("x",))
    bq, bkv = anchor.blocks[:2]
    whole = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.ShapeDtypeStruct((2, n, HEAD_DIM), jnp.bfloat16, sharding=whole)
            for n in (2 * bq, KV_BLOCKS * bkv))  # fmt: skip

    def run(q: Any, k: Any, v: Any) -> Any:
        return module._splash_attention_forward_ring(
            q, k, v, module._BlockSizes(*anchor.blocks),
            use_experimental_scheduler=anchor.scheduler, vmem_limit_bytes=60 * 2**20,
            use_fixed_m=anchor.fixed, uniform_fixed_m=anchor.fixed,
        )  # fmt: skip

    with jax.set_mesh(mesh):
        traced = jax.jit(run).trace(q, k, k)
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text is not None
    return text


def _ranking(ranking: Ranking, seconds: float) -> str:
    one, other = (_time(ranking, blocks, seconds) for blocks in (ranking.slow, ranking.fast))
    tiles = " over ".join("/".join(map(str, b)) for b in (ranking.slow, ranking.fast))
    head = f"{ranking.target} {ranking.kernel}, time of {tiles}"
    if isinstance(one, str) or isinstance(other, str):
        return f"{head}: no estimate ({one}; {other})"
    rates = " over ".join(f"{t.flops / t.slow:.0f} to {t.flops / t.fast:.0f}" for t in (one, other))
    ratios = f"{one.slow / other.slow:.2f} (slow ends), {one.fast / other.fast:.2f} (fast ends)"
    words = f"{rates} TFLOP/s, estimated by libtpu {one.libtpu}'s schedule, not run"
    return f"{head}: {ratios}; {words}; {ranking.published}"


class Time(NamedTuple):
    """Hold a forward's seconds, its work in TFLOP, and the version of libtpu."""

    fast: float
    slow: float
    flops: float
    libtpu: str


def _time(ranking: Ranking, blocks: tuple[int, int, int], seconds: float) -> Time | str:
    """Return a forward of about Wan 1.3B at 480p, or why there is none."""
    os.environ["LIBTPU_INIT_ARGS"] = VMEM
    q, kv, compute = blocks
    sizes = FlashBlockSizes(block_q=q, block_kv=kv, block_kv_compute=compute)
    config = AttentionConfig(attention=ranking.kernel, flash_block_sizes=sizes)
    job = CompileJob(ranking.target, config, read(SHAPE), devices=1, estimate=True)
    outcome = run_in_child(job, seconds)
    if outcome.ending != "compiled" or "refused" in outcome.estimate:
        return f"{outcome.ending}: {outcome.estimate.get('refused') or outcome.message}"
    (kernel,) = outcome.estimate["kernels"]
    if tuple(kernel["block"]) != blocks[:2]:
        return f"the tile became {kernel['block']}"
    fast, slow = kernel["seconds"]
    return Time(fast, slow, kernel["flops"] / 1e12, outcome.estimate["libtpu"])


if __name__ == "__main__":
    main()
