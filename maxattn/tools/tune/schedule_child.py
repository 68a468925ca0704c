"""Compile TPU kernels one after the other, and answer what a step of each costs.

`python -m maxattn.tools.tune.schedule_child FOLDER FD` reads a `KernelJob` a line as JSON from
stdin, and writes an answer a line to the file descriptor: first the versions, then of each job
`{"cost": [...]}` or `{"failed": "..."}`; the forward of `tpu_flash` also answers what the online
softmax costs, `"online": [...]`. libtpu writes its schedules into the folder, which is emptied
after each. `schedule_compiler.py` starts it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from maxattn.errors import MaxattnError
from maxattn.tools.tune.kernel_job import COLUMNS, KernelJob

TOPOLOGIES = {
    "TPU v4": "v4:1x1x1",
    "TPU v5e": "v5e:1x1",
    "TPU v5p": "v5p:1x1x1",
    "TPU v6e": "v6e:1x1",
    "TPU v7x": "tpu7x:1x1x1",
}
NICE = 10  # steps behind the user's own work
LONGEST_MESSAGE = 600  # characters of an error of the compiler


def answer_of(job: KernelJob, folder: Path) -> dict[str, Any]:
    """Compile one kernel; what goes wrong is in the answer."""
    try:
        return _costs(job, folder)
    # The compiler's own: not enough VMEM, or a kernel that it cannot make; and refused dumps.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        kept = lines if isinstance(error, MaxattnError) else lines[:1]
        text = "; ".join(line.strip() for line in kept)[:LONGEST_MESSAGE]
        return {"failed": f"{type(error).__name__}: {text}"}
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _costs(job: KernelJob, folder: Path) -> dict[str, Any]:
    from maxattn.devices import DEVICES
    from maxattn.tools.compile.hlo import HloProgram
    from maxattn.tools.estimate.kernel import KernelDump, online_cost_of, step_cost_of
    from maxattn.tools.estimate.program import Dumps, pallas_calls

    compiled, version = _compiled(job), metadata.version("libtpu")
    (call,) = pallas_calls(HloProgram.read(compiled.as_text()))
    texts = Dumps.of(folder, version).texts(call.twins)
    dump = KernelDump.read(call.name, *texts, DEVICES[job.device_kind], version)
    cost = step_cost_of(dump, COLUMNS, job.steps)
    online = online_cost_of(dump, cost)
    return {"cost": list(cost)} | ({"online": list(online)} if online else {})


def _compiled(job: KernelJob) -> Any:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from maxattn.tools.compile.topology import one_device

    mesh = Mesh([one_device(TOPOLOGIES[job.device_kind])], ("x",))
    whole = PartitionSpec()
    function, shapes = _function(job)
    operands = (
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, whole)) for shape in shapes
    )
    # The libraries ask the mesh of a shard_map which TPU they compile for.
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": whole, "out_specs": whole}
    sharded = jax.jit(jax.shard_map(function, **specs, check_vma=False))
    return sharded.trace(*operands).lower(lowering_platforms=("tpu",)).compile()


def _function(job: KernelJob) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what runs the kernel, and the shapes and dtypes of its operands."""
    from maxattn.block_sizes.estimated.step_cost import Evaluates
    from maxattn.kernels.splash.calls import SplashProblem, Stats
    from maxattn.masks import Full, LocalWindow
    from maxattn.masks.terms import SplitMask, split_mask

    (q_len, kv_len), heads = job.lengths, (job.batch, job.heads)
    mask = LocalWindow(*job.window) if job.masked == Evaluates.INTERVAL else Full()
    parts = split_mask(mask.bind(q_len, kv_len, *heads).form())
    assert isinstance(parts, SplitMask), parts
    q, k = ((*heads, n, job.head_dim) for n in (q_len, kv_len))
    rows = (*heads, q_len), "float32"
    shapes = [(q, job.dtype), (k, job.dtype), (k, job.dtype), rows, (q, job.dtype), rows]

    def run(*operands: Any) -> Any:
        q, k, v, *stats = operands
        problem = SplashProblem(
            q, k, v, parts, 0, 0, _library(job), rows_at_once=job.kernel == "tpu_flash"
        )
        if job.kind == "fwd":
            return problem.forward_of(job.tile)
        if job.kind == "dq":
            return problem.dq(job.tile, Stats(*stats))
        return problem.dkv(job.tile, Stats(*stats), job.kind == "fused")

    return run, tuple(shapes[:3] if job.kind == "fwd" else shapes)


def _library(job: KernelJob) -> Any:
    from maxattn.block_sizes.sizes import LANES
    from maxattn.devices import DEVICES
    from maxattn.kernels.splash.jax_splash import JaxSplash
    from maxattn.kernels.splash.tokamax import TokamaxSplash
    from maxattn.kernels.tpu_flash import Transposed

    if job.kernel == "tpu_flash":
        core = DEVICES[job.device_kind].core
        return Transposed(False, v_is_turned=core is not None and core.side == LANES)
    return JaxSplash(False) if job.kernel == "flash" else TokamaxSplash(False, False, False)


def versions() -> dict[str, str]:
    """Return the versions that schedules depend on, of what is installed."""
    found = {}
    for name in ("libtpu", "jax", "tokamax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Answer until stdin ends."""
    from maxattn.tools.compile.child import dump_into

    folder = Path(sys.argv[1])
    os.nice(NICE)
    dump_into(folder)
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        print(json.dumps(versions()), file=answers, flush=True)
        for line in sys.stdin:
            found = answer_of(KernelJob.of(json.loads(line)), folder)
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
