"""Compile attention for a TPU topology, with libtpu and without a TPU, in a child process.

`python -m maxattn.tools.compile.child FILE` reads a `CompileJob` as JSON from stdin and writes an
`Outcome` as JSON to FILE. `job.py` starts it. Where an estimate is asked for, the compiler writes
its schedules beside FILE, in a folder that the parent deletes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxattn.errors import MaxattnError, Unsupported
from maxattn.tools.compile.job import CompileJob, Outcome
from maxattn.tools.compile.job_json import job_values

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from maxattn.plan import Plan
    from maxattn.target import Target

FLAGS = "LIBTPU_INIT_ARGS"


def outcome_of(job: CompileJob, folder: Path) -> Outcome:
    """Plan and compile one job; what goes wrong is in the outcome.

    Args:
        job: what to compile.
        folder: where the compiler writes its schedules, if an estimate is asked for.
    """
    from maxattn.plan import plan
    from maxattn.tools.compile.topology import devices_of

    try:
        devices = devices_of(job)
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
    """Return the target that a device of a topology stands for."""
    from maxattn.devices import device_kind
    from maxattn.target import Target, installed

    # The limit of VMEM that it may set is the one that the tiles must keep.
    env = ((FLAGS, os.environ[FLAGS]),) if FLAGS in os.environ else ()
    return Target("tpu", device_kind(kind), installed(), env)


def _compiled(job: CompileJob, decided: Plan, mesh: Mesh, folder: Path) -> Outcome:
    import jax

    from maxattn.tools.compile.programs import program_of

    named = (c for c in decided.collectives if job.training or c.when == "forward")
    facts = {
        "device_kind": decided.target.device_kind,
        "plan": decided.explain(),
        "mesh": dict(mesh.shape),
        "named": [asdict(c) for c in named],
    }
    function, operands = program_of(job, decided, mesh)
    trace = jax.jit(function).trace(*operands)
    return _ended(job, trace, mesh, facts, partial(_estimate, job, decided, folder))


def _estimate(job: CompileJob, decided: Plan, folder: Path, text: str) -> dict[str, Any]:
    from maxattn.tools.estimate.block import block_estimate
    from maxattn.tools.estimate.program import estimate_of
    from maxattn.tools.estimate.tiles import tiles_of

    device, training = decided.target.device, job.training
    if job.block:
        return block_estimate(text, device, decided, training, job.config.remat_policy)
    return estimate_of(text, folder, device, tiles_of(decided, training))


def _compiled_file(job: CompileJob, target: Target, mesh: Mesh, folder: Path) -> Outcome:
    """Compile the function of a file; nothing is planned."""
    from maxattn.tools.compile import kernel_file as of_file
    from maxattn.tools.estimate.program import estimate_of

    of_file.check_kernel_job(job)
    trace = of_file.traced(job, of_file.program_of_file(job, mesh))
    facts = {"device_kind": target.device_kind, "mesh": dict(mesh.shape)}
    flops = 0.0 if job.training else of_file.forward_flops(job)

    def priced(text: str) -> dict[str, Any]:
        return estimate_of(text, folder, target.device, {}, flops)

    return _ended(job, trace, mesh, facts, priced)


def _ended(
    job: CompileJob,
    traced: Any,
    mesh: Mesh,
    facts: dict[str, Any],
    priced: Callable[[str], dict[str, Any]],
) -> Outcome:
    """Compile a traced program.

    Args:
        job: what it is of.
        traced: the program.
        mesh: of the devices.
        facts: what is known of it before.
        priced: makes the estimate of the compiled text.
    """
    from maxattn.tools.compile.hlo import axes_of, transfers

    started = time.perf_counter()
    try:
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    # The compiler's own: not enough memory, or a kernel that it cannot make.
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
        except Unsupported as error:  # a schedule that is not understood
            estimate = {"refused": str(error)}
    made = {"seconds": took, "memory": memory, "found": found, "estimate": estimate}
    return Outcome("compiled", **made, **facts)


def dump_into(folder: Path) -> None:
    """Make libtpu write its schedules: it reads its flags when it is loaded, which is later."""
    from maxattn.tools.estimate.program import dump_flags

    folder.mkdir()
    given = os.environ.get(FLAGS, "")
    os.environ[FLAGS] = f"{given} {dump_flags(folder)}".strip()


def main() -> None:
    """Read a job, compile it, write the outcome."""
    job = CompileJob(**job_values(sys.stdin.read()))
    answer = Path(sys.argv[1])
    folder = answer.with_name("schedules")
    if job.estimate and not job.block:
        dump_into(folder)
    beside = answer.with_suffix(".partial")
    beside.write_text(json.dumps(asdict(outcome_of(job, folder))), encoding="utf-8")
    beside.replace(answer)  # a child that is killed leaves a whole one or none


if __name__ == "__main__":
    main()
