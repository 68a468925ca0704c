"""Measure a denoising step or a training step of Wan 2.1 or SDXL at real size, with random weights.

    python examples/measure.py wan denoise
    python examples/measure.py wan train remat_policy=SAVE_ATTENTION --profile out/profile
    python examples/measure.py sdxl train --batch 8 --height 1024 --width 1024 attention=dot_product

Prints milliseconds a step, the peak of the device's memory, the share of the device's peak rate
(MFU), and with --profile how long attention, matrix products and the rest took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measuring import breakdown, clock, flops, workloads
from measuring.steps import Step, denoising, training

import maxattn as ma
from maxattn.errors import MaxattnError
from maxattn.tools.xla_options import xla_options

DTYPES = {"bf16": jnp.bfloat16, "float32": jnp.float32}


def main(said: argparse.Namespace) -> None:
    """Compile, wait where that was asked for, run, and say what was seen."""
    config = ma.AttentionConfig.from_overrides(said.overrides)
    work = workload(said, config)
    began = time.perf_counter()
    options = xla_options(said.option)
    step = (training if said.what == "train" else denoising)(work, DTYPES[said.dtype], options)
    compiled = time.perf_counter() - began
    needs = compiler_bytes(step) / 2**30
    print(
        f"{work.name}: {said.what}, {said.dtype}; compiled in {compiled:.0f} s, needs"
        f" {needs:.1f} GiB",
        flush=True,
    )
    if said.hlo:
        Path(said.hlo).write_text(step.compiled.as_text())
    if said.compile_only:
        return
    count = flops.count(step.forward, *step.shapes)
    wait_for(said.start_when)
    times = clock.measure(step, said.rounds, said.steps, said.profile)
    facts = facts_of(said, work, step, times, count) | {"compile_s": round(compiled, 1)}
    print("\n".join(lines(facts)), flush=True)
    if said.json:
        Path(said.json).write_text(json.dumps(facts, indent=1) + "\n")


def workload(said: argparse.Namespace, config: ma.AttentionConfig) -> workloads.Workload:
    """Return what the command line asks for."""
    if said.model == "wan":
        return workloads.wan(
            config, said.batch or 1, said.height or 480, said.width or 832, said.frames
        )
    return workloads.sdxl(config, said.batch or 8, said.height or 1024, said.width or 1024)


def wait_for(path: str | None) -> None:
    """Wait until a file is there: several commands can compile at once, and then run one after the
    other.
    """
    if path is None:
        return
    Path(f"{path}.ready").touch()
    while not Path(path).exists():
        time.sleep(0.05)


def facts_of(
    said: argparse.Namespace,
    work: workloads.Workload,
    step: Step,
    times: clock.Times,
    count: flops.Work,
) -> dict[str, Any]:
    """Collect what was measured, for people and for files."""
    device = jax.local_devices()[0].device_kind
    total, peak = count.total(said.what == "train"), flops.peak(device)
    return {
        "model": work.name,
        "step": said.what,
        "dtype": said.dtype,
        "overrides": said.overrides,
        "options": said.option,
        "device": device,
        "jax": jax.__version__,
        "ms": times.median,
        "rounds_ms": times.ms,
        "peak_bytes": times.peak,
        "compiler_bytes": compiler_bytes(step),
        "tokens_per_s": 1e3 * work.tokens / times.median,
        "flop": total,
        "flop_attention_forward": count.attention,
        "flop_matmul_forward": count.matmul,
        "mfu": total / (times.median / 1e3) / peak if peak else None,
        "breakdown_ms": breakdown.by_kind(times.kernels),
        "kernels": [asdict(k) for k in times.kernels[:60]],
    }


def compiler_bytes(step: Step) -> int:
    """Return the bytes of arguments and temporaries, as the compiler counts them."""
    memory = step.compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else 0


def lines(facts: dict[str, Any]) -> list[str]:
    """Write the facts for people."""
    spread = f"{min(facts['rounds_ms']):.1f} to {max(facts['rounds_ms']):.1f}"
    rate = facts["flop"] / facts["ms"] / 1e9
    mfu = f", {facts['mfu']:.0%} of the peak of an {facts['device']}" if facts["mfu"] else ""
    memory = facts["peak_bytes"] or facts["compiler_bytes"]
    found = [
        f"step    {facts['ms']:.1f} ms ({spread}), {facts['tokens_per_s']:,.0f} tokens/s",
        f"work    {facts['flop'] / 1e12:.1f} TFLOP without recomputation, {rate:.0f} TFLOP/s{mfu}",
        f"memory  {memory / 2**30:.1f} GiB"
        + ("" if facts["peak_bytes"] else ", by the compiler's account"),
    ]
    if any(facts["breakdown_ms"].values()):
        found.append(
            "time    "
            + ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in facts["breakdown_ms"].items())
        )
        found += [
            f"        {k['ms']:8.2f} ms  {k['calls']:6.1f} x  {k['kind']:9}  {k['name'][:90]}"
            for k in facts["kernels"][:20]
        ]
    return found


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", choices=("wan", "sdxl"))
    p.add_argument("what", choices=("denoise", "train"))
    p.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="attention's settings: attention=dot_product",
    )
    for name, told in (
        ("batch", "examples in a step"),
        ("height", "in pixels"),
        ("width", "in pixels"),
    ):
        p.add_argument(
            f"--{name}",
            type=int,
            help=f"{told}; default 1 video of 832x480, 8 pictures of 1024x1024",
        )
    p.add_argument("--frames", type=int, default=81, help="of a video; default 81")
    p.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of the computation; default bf16"
    )
    p.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of XLA's compiler"
    )
    p.add_argument("--rounds", type=int, default=5, help="that are timed; default 5")
    p.add_argument("--steps", type=int, default=3, help="in a round; default 3")
    p.add_argument(
        "--profile", metavar="FOLDER", help="record a round, and say where its time went"
    )
    p.add_argument("--hlo", metavar="FILE", help="write the compiled program")
    p.add_argument("--json", metavar="FILE", help="write every figure")
    p.add_argument(
        "--compile-only", action="store_true", help="run nothing: fills JAX_COMPILATION_CACHE_DIR"
    )
    p.add_argument(
        "--start-when", metavar="FILE", help="compile, touch FILE.ready, and run once FILE is there"
    )
    return p


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except MaxattnError as error:
        sys.exit(f"error: {error}")
