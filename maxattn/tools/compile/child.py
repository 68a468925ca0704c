"""The child process that compiles for a TPU topology with libtpu, without a TPU.

`python -m maxattn.tools.compile.child FOLDER FD` reads requests as lines of JSON from stdin, and
writes answers as lines of JSON to the file descriptor FD. `process.py` starts it. A request has
one of these keys:

    versions  answered by the versions of libtpu, jax and tokamax
    compile   a `CompileJob`, answered by an `Outcome`
    kernel    a `KernelJob`, answered by the cost of one grid step (tune/kernel_job.py)

The compiler writes its schedules into FOLDER, unless the argument FOLDER is "".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxattn.errors import MaxattnError, Unsupported
from maxattn.tools.compile.job import CompileJob, Outcome, job_of

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from maxattn._plan import Plan
    from maxattn.target import Target
    from maxattn.tools.estimate.kernel import KernelDump, KernelTiles

FLAGS = "LIBTPU_INIT_ARGS"
# Without the category libtpu also writes the bundles before register allocation.
DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
    " --xla_jf_dump_category_filter=codegen"
)
Priced = Callable[[str], dict[str, Any]]
"""A function that makes an estimate from a compiled program's text."""


def main() -> None:
    """Answer requests until stdin ends."""
    folder = Path(sys.argv[1])
    if sys.argv[1]:  # before libtpu is loaded and reads its flags
        folder.mkdir()
        dumps = f"--xla_jf_dump_to={folder} {DUMP_FLAGS}"
        os.environ[FLAGS] = f"{os.environ.get(FLAGS, '')} {dumps}".strip()
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            found = _answer(json.loads(line), folder)
            print(json.dumps(found), file=answers, flush=True)


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    if "compile" in request:
        return asdict(outcome_of(job_of(request["compile"]), folder))
    if "kernel" in request:
        from maxattn.tools.tune.kernel_job import KernelJob, answer_of

        return answer_of(KernelJob.of(request["kernel"]), folder)
    return versions()


def versions() -> dict[str, str]:
    """Return the versions that schedules depend on, if they are installed."""
    found = {}
    for name in ("libtpu", "jax", "tokamax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def outcome_of(job: CompileJob, folder: Path) -> Outcome:
    """Plan and compile one job; errors are in the outcome."""
    from maxattn.decide import plan
    from maxattn.tools.compile.programs import devices_of

    try:
        devices = devices_of(job.topology, job.slices, job.devices)
        mesh = job.config.make_mesh(devices)
        target = target_of(str(devices[0].device_kind))
        with target.assumed():
            if job.kernel_file:
                return _compiled_file(job, target, mesh, folder)
            decided = plan(job.shape.call(), job.config, mesh, target)
            return _compiled(job, decided, mesh, folder)
    except MaxattnError as error:
        return Outcome("refused", message=str(error))


def target_of(kind: str) -> Target:
    """Return the target for a kind of device of a topology."""
    from maxattn.devices import device_kind
    from maxattn.target import Target, installed

    # Tiles must fit the VMEM limit that XLA's flags may set.
    env = ((FLAGS, os.environ[FLAGS]),) if FLAGS in os.environ else ()
    return Target("tpu", device_kind(kind), installed(), env)


def _compiled(job: CompileJob, decided: Plan, mesh: Mesh, folder: Path) -> Outcome:
    import jax

    from maxattn.tools.compile.programs import cross_plan, program_of
    from maxattn.tools.estimate.kernel import tiles_of
    from maxattn.tools.estimate.program import block_estimate, estimate_of

    device, training = decided.target.device, job.training
    named = (c for c in decided.collectives if training or c.when == "forward")
    facts = {
        "device_kind": decided.target.device_kind,
        "plan": decided.explain(),
        "mesh": dict(mesh.shape),
        "named": [asdict(c) for c in named],
    }
    function, operands = program_of(job, decided, mesh)
    traced = jax.jit(function).trace(*operands)

    def priced(text: str) -> dict[str, Any]:
        if job.block:
            plans = decided, cross_plan(job, decided, mesh)
            return block_estimate(text, device, plans, training, job.config.remat_policy)
        tiles = tiles_of(decided, training)

        def of_pass(dump: KernelDump) -> KernelTiles | None:
            return tiles.get(dump.phase) if dump.phase else None

        return estimate_of(text, folder, device, of_pass)

    return _ended(job, traced, mesh, facts, priced)


def _compiled_file(job: CompileJob, target: Target, mesh: Mesh, folder: Path) -> Outcome:
    from maxattn.tools.compile import kernel_file as of_file
    from maxattn.tools.estimate.file_tiles import counted
    from maxattn.tools.estimate.program import estimate_of

    of_file.check_kernel_job(job, len(mesh.devices.flat))
    traced = of_file.traced_file(job, mesh)
    facts = {"device_kind": target.device_kind, "mesh": dict(mesh.shape)}
    # Tiles given without a mask do not show how many pairs the function computes.
    is_unknown = job.training or (job.visited and job.shape.mask.is_full)
    flops = 0.0 if is_unknown else job.shape.operations
    priced = partial(
        estimate_of,
        folder=folder,
        device=target.device,
        tiles_of=(lambda _: None) if job.training else counted(job.shape, job.visited),
        forward_flops=flops,
    )
    return _ended(job, traced, mesh, facts, priced)


def _ended(
    job: CompileJob, traced: Any, mesh: Mesh, facts: dict[str, Any], priced: Priced
) -> Outcome:
    """Compile a traced program; `facts` are fields of the outcome that are known before."""
    from maxattn.tools.compile.hlo import axes_of, transfers

    started = time.perf_counter()
    try:
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    # The compiler's own errors: not enough memory, or a kernel that it cannot compile.
    except Exception as error:
        took, message = time.perf_counter() - started, f"{type(error).__name__}: {error}"
        return Outcome("failed", seconds=took, message=message, **facts)
    took, text = time.perf_counter() - started, compiled.as_text()
    stats = compiled.memory_analysis()
    names = ("argument", "temp", "output", "alias", "generated_code")
    memory = {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}
    kept = ("kind", "bytes", "times", "is_async", "is_overlapped", "groups")
    found = [
        {name: getattr(t, name) for name in kept}
        | {"axes": list(axes_of(t, dict(mesh.shape))), "kernels": list(t.kernels), "line": t.start}
        for t in transfers(text)
    ]
    estimate: dict[str, Any] = {}
    if job.estimate:
        try:
            estimate = priced(text)
        except Unsupported as error:  # a schedule in an unknown format
            estimate = {"refused": str(error)}
    made = {"seconds": took, "memory": memory, "found": found, "estimate": estimate}
    return Outcome("compiled", **made, **facts)


if __name__ == "__main__":
    main()
