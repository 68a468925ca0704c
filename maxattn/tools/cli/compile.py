"""`maxattn compile`: compile for a TPU that is not there, and report memory and transfers."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any

from maxattn.config.errors import plain
from maxattn.config.numbers import MOST_DEVICES, whole
from maxattn.config.target_names import read_target
from maxattn.context_parallel.base import readable
from maxattn.devices import DEVICES, memory_of
from maxattn.errors import ConfigError, InputError, MeshError
from maxattn.tools.cli.estimates import estimate_lines, is_refused
from maxattn.tools.cli.inputs import read_source, shapes_of
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.kernel_file import name_of, read_kernel_file


def run(args: argparse.Namespace) -> int:
    """Compile each shape and print what came of it."""
    source, topology = read_source(args), topology_of(args.target)
    if whole(args.slices, most=MOST_DEVICES) is None or (args.slices > 1 and args.devices):
        rule = "there is at least one slice, and several are used whole"
        raise MeshError("slices", plain(args.slices), rule, "write --slices 2 without --devices")
    _check_block(args)
    file = read_kernel_file(args.kernel_file) if args.kernel_file else ""
    how = args.train, args.module, args.devices, args.slices, args.estimate, args.block, args.layers
    outcomes = []
    for shape in shapes_of(args, source):
        job = CompileJob(topology, source.config, shape, *how, file)
        outcomes.append(run_in_child(job, args.time_limit))
        if not args.json:
            blank = "\n" if len(outcomes) > 1 else ""
            print(blank + report(job, outcomes[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    return int(not all(fits(one) and not is_refused(one.estimate) for one in outcomes))


def _check_block(args: argparse.Namespace) -> None:
    if args.block and (whole(args.block) is None or args.module):
        rule = "a block has a feed-forward of a width above 0, and has the module in it"
        raise InputError("--block", plain(args.block), rule, "write --block 13824 without --module")
    if whole(args.layers) is None or (args.layers > 1 and not args.estimate):
        rule = "a step runs one layer or more, and they are counted in an estimate"
        raise InputError("--layers", plain(args.layers), rule, "write --layers 40 --estimate")


def topology_of(target: str) -> str:
    """Return libtpu's name of a target, one host of it where no chips are written."""
    name = read_target(target)
    if DEVICES[name.kind].platform != "tpu":
        rule = f"compile has the compiler of TPUs, and {name.kind} is none"
        remedy = "use explain or check, which need no compiler, or name a TPU, such as v5p:2x2x1"
        raise ConfigError("target", target, rule, remedy)
    return name.topology


def fits(outcome: Outcome) -> bool:
    """Return whether it compiled, and needs no more memory than a device has."""
    memory = memory_of(outcome.device_kind) or float("inf")
    return outcome.ending == "compiled" and outcome.needed <= memory


# ---- the report ----------------------------------------------------------------------------------

_TOO_MUCH = "does not fit: `maxattn check` with the same shape lists what helps"
_MEMORY = {"arguments": "argument", "temporaries": "temp", "outputs": "output"}


def report(job: CompileJob, outcome: Outcome) -> str:
    """Write an outcome for a person."""
    what = "attention module" if job.module else "attention"
    what = f"transformer block, feed-forward {job.block}" if job.block else what
    what = name_of(job) if job.kernel_file else what
    training = ", forward and backward" if job.training else ""
    machine = job.topology if job.slices == 1 else f"{job.slices} slices of {job.topology}"
    kind = f" ({outcome.device_kind})" if outcome.plan else ""
    head = f"{job.shape.name}: {what}{training}, for {machine}{kind}"
    if outcome.ending != "compiled":
        return "\n".join((head, *outcome.plan.splitlines(), _failure(outcome)))
    lines = [f"  compiled in {outcome.seconds:.1f} s", _memory(outcome), *_transfers(job, outcome)]
    lines += estimate_lines(outcome, job.layers)
    verdict = "fits" if fits(outcome) else _TOO_MUCH
    return "\n".join((head, *outcome.plan.splitlines(), *lines, verdict))


def _memory(outcome: Outcome) -> str:
    sizes, most = outcome.memory, memory_of(outcome.device_kind)
    parts = " + ".join(f"{name} {readable(sizes[key])}" for name, key in _MEMORY.items())
    shared = f" - {readable(sizes['alias'])} shared" if sizes["alias"] else ""
    limit = f" of {readable(most)}" if most else ""
    return f"  memory  {parts}{shared} = {readable(outcome.needed)}{limit} on each device"


def _transfers(job: CompileJob, outcome: Outcome) -> list[str]:
    """Write the program's transfers beside the plan's, one line for each kind and its axes."""

    def of(listed: list[dict[str, Any]], row: tuple[str, tuple[str, ...]]) -> list[dict[str, Any]]:
        return [c for c in listed if (c["kind"], tuple(c["axes"])) == row]

    lines = []
    every = (*outcome.named, *outcome.found)
    for row in sorted({(c["kind"], tuple(c["axes"])) for c in every}):
        found, named = of(outcome.found, row), of(outcome.named, row)
        runs = sum(c["times"] for c in found)
        overlapped = sum(c["times"] for c in found if c["is_overlapped"])
        waiting = sum(c["times"] for c in found if not c["is_async"])
        size = readable(sum(c["bytes"] * c["times"] for c in found))
        text = f"{row[0]} over {'+'.join(row[1]) or 'no axis'}: {runs} in the program, {size}"
        if found:
            waited = f", {waiting} waited for on the spot" if waiting else ""
            text += f", {overlapped} overlapped with a kernel{waited}"
        owner = ": of the projections and their gradients" if job.module or job.block else ""
        planned = f"{readable(sum(c['bytes'] for c in named))} in the plan"
        lines.append(f"  sends   {text} ({planned if named else f'none in the plan{owner}'})")
    return lines or ["  sends   nothing"]


def _failure(outcome: Outcome) -> str:
    message = outcome.message
    if outcome.ending == "refused":
        return f"{message}\nrefused"
    if outcome.ending == "timeout":
        return f"{message}: raise --time-limit, or compile a shorter shape\nnot compiled"
    if outcome.ending == "crashed":
        return f"{message}\nnot compiled"
    # The compiler's sentences, without its listings of buffers and traces.
    kept = re.split(r"\n\s*\n|\n={3,}|\nLargest program allocations", message.strip())[0]
    kept = kept if len(kept) <= 1200 else f"{kept[:600]} ... {kept[-600:]}"
    if "vmem" in message.lower():
        return f"{kept}\ndoes not fit VMEM: smaller flash_block_sizes"
    is_memory = "RESOURCE_EXHAUSTED" in message or "hbm" in message.lower()
    return f"{kept}\n{_TOO_MUCH if is_memory else 'does not compile'}"
