"""Compile attention for TPUs that are not there, with the TPU's compiler; say whether it fits.

  maxattn compile configs/wan_14b.yml ici_fsdp_parallelism=1 --target v5p:2x2x1 \\
      --shape wan-14b-720p
  maxattn compile attention=ring ici_context_parallelism=4 --target v6e:2x2 \\
      --shape wan-14b-480p --train --module

Needs libtpu (pip install "maxattn[tpu]"), no TPU. Each shape is compiled in a process of its own.
Exit status 0: all of them compile and fit; 1: one does not, or its estimate was refused.

  maxattn compile attention=flash --target v6e --devices 1 --shape wan-1.3b-480p --estimate

prices every Pallas kernel, and the whole program, by the schedule that libtpu made. Nothing runs.
--block 13824 --layers 40 beside it predicts a step of a model from one of its blocks.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.errors import plain
from maxattn.config.numbers import MOST_DEVICES, whole
from maxattn.config.target_names import read_target
from maxattn.context_parallel.base import readable
from maxattn.devices import DEVICES, memory_of
from maxattn.errors import ConfigError, InputError, MeshError
from maxattn.tools.cli.estimates import estimate_lines, is_refused
from maxattn.tools.cli.shapes import shape_arguments, shapes_of
from maxattn.tools.cli.source import config_arguments, read_source
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.kernel_file import name_of, read_kernel_file
from maxattn.tools.model_shapes import Shape

_TARGET = (
    "chips along each side: v4:2x2x1, v5e:2x2, v5p:2x2x1, v6e:2x2, tpu7x:2x2x1; default a host"
)
_SLICES = "so many of the topology, for dcn_*_parallelism"
_MODULE = (
    "a whole FlaxAttention or CrossAttention as Wan has it: "
    "projections with bias, norms across heads, RoPE"
)
_ESTIMATE = "price each kernel, and the whole, by the schedule that libtpu makes; nothing runs"
_BLOCK = (
    "a whole transformer block as Wan has it: both attentions and a feed-forward of this width; "
    "remat_policy holds for it"
)
_LAYERS = "with --estimate: what so many of them take, one after the other"
_FILE = (
    "compile FUNCTION(q, k, v, config) of a file in place of maxattn's attention, on one device: "
    "arrays [B, T, N, H]; every query sees every key"
)
_LIMIT = "seconds a compile; default 600"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    config_arguments(parser)
    shape_arguments(parser)
    add = parser.add_argument
    add("--target", required=True, help=_TARGET)
    add("--devices", type=int, help="use the first N devices of the topology")
    add("--slices", type=int, default=1, metavar="N", help=_SLICES)
    add("--train", action="store_true", help="forward and backward; default forward")
    add("--module", action="store_true", help=_MODULE)
    add("--block", type=int, default=0, metavar="N", help=_BLOCK)
    add("--layers", type=int, default=1, metavar="N", help=_LAYERS)
    add("--estimate", action="store_true", help=_ESTIMATE)
    add("--kernel-file", default="", metavar="PATH:FUNCTION", help=_FILE)
    add("--time-limit", type=float, default=600.0, metavar="S", help=_LIMIT)
    add("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Compile each shape and print what came of it."""
    source = read_source(args)
    args.topology = topology_of(args.target)
    if whole(args.slices, most=MOST_DEVICES) is None or (args.slices > 1 and args.devices):
        rule = "there is at least one slice, and several are used whole"
        raise MeshError("slices", plain(args.slices), rule, "write --slices 2 without --devices")
    _check_block(args)
    args.kernel_file = read_kernel_file(args.kernel_file) if args.kernel_file else ""
    outcomes = []
    for shape in shapes_of(args, source):
        job = _job(args, source.config, shape)
        outcomes.append(run_in_child(job, args.time_limit))
        if not args.json:
            blank = "\n" if len(outcomes) > 1 else ""
            print(blank + report(job, outcomes[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    return int(not all(fits(one) and not is_refused(one.estimate) for one in outcomes))


def _check_block(args: argparse.Namespace) -> None:
    """Refuse sizes of a block, or of a step, that are none.

    Raises:
        InputError: naming the option.
    """
    if args.block and (whole(args.block) is None or args.module):
        rule = "a block has a feed-forward of a width above 0, and has the module in it"
        raise InputError("--block", plain(args.block), rule, "write --block 13824 without --module")
    if whole(args.layers) is None or (args.layers > 1 and not args.estimate):
        rule = "a step runs one layer or more, and they are counted in an estimate"
        raise InputError("--layers", plain(args.layers), rule, "write --layers 40 --estimate")


def _job(args: argparse.Namespace, config: AttentionConfig, shape: Shape) -> CompileJob:
    how = args.train, args.module, args.devices, args.slices, args.estimate
    sizes = args.block, args.layers
    return CompileJob(args.topology, config, shape, *how, *sizes, args.kernel_file)


def topology_of(target: str) -> str:
    """Return libtpu's name of a target, one host of it where no chips are written.

    Raises:
        ConfigError: for a name that is not known, or of no TPU.
    """
    name = read_target(target)
    if DEVICES[name.kind].platform != "tpu":
        rule = f"compile has the compiler of TPUs, and {name.kind} is none"
        remedy = "use explain or check, which need no compiler, or name a TPU, such as v5p:2x2x1"
        raise ConfigError("target", target, rule, remedy)
    return name.topology


def fits(outcome: Outcome) -> bool:
    """Say whether it compiled, and needs no more memory than a device has."""
    memory = memory_of(outcome.device_kind) or float("inf")
    return outcome.ending == "compiled" and outcome.needed <= memory


# ---- the report ----------------------------------------------------------------------------------


def report(job: CompileJob, outcome: Outcome) -> str:
    """Write an outcome for a person."""
    what = "attention module" if job.module else "attention"
    what = f"transformer block, feed-forward {job.block}" if job.block else what
    what = name_of(job) if job.kernel_file else what
    training = ", forward and backward" if job.training else ""
    kind = f" ({outcome.device_kind})" if outcome.plan else ""
    head = f"{job.shape.name}: {what}{training}, for {_machine(job)}{kind}"
    body = _compiled(job, outcome) if outcome.ending == "compiled" else _failure(outcome)
    return "\n".join((head, *outcome.plan.splitlines(), body))


def _compiled(job: CompileJob, outcome: Outcome) -> str:
    lines = [f"  compiled in {outcome.seconds:.1f} s", _memory(outcome), *_transfers(job, outcome)]
    lines += estimate_lines(outcome, job.layers)
    return "\n".join((*lines, "fits" if fits(outcome) else _TOO_MUCH))


def _machine(job: CompileJob) -> str:
    return job.topology if job.slices == 1 else f"{job.slices} slices of {job.topology}"


def _memory(outcome: Outcome) -> str:
    sizes, most = outcome.memory, memory_of(outcome.device_kind)
    parts = " + ".join(f"{name} {readable(sizes[key])}" for name, key in _MEMORY.items())
    shared = f" - {readable(sizes['alias'])} shared" if sizes["alias"] else ""
    limit = f" of {readable(most)}" if most else ""
    return f"  memory  {parts}{shared} = {readable(outcome.needed)}{limit} on each device"


_MEMORY = {"arguments": "argument", "temporaries": "temp", "outputs": "output"}


def _transfers(job: CompileJob, outcome: Outcome) -> list[str]:
    """Write what the program sends beside what the plan named, one line a kind and its axes."""
    every = (*outcome.named, *outcome.found)
    rows = sorted({(c["kind"], tuple(c["axes"])) for c in every})
    return [f"  sends   {_row(job, outcome, *row)}" for row in rows] or ["  sends   nothing"]


def _row(job: CompileJob, outcome: Outcome, kind: str, axes: tuple[str, ...]) -> str:
    found, named = _same(outcome.found, kind, axes), _same(outcome.named, kind, axes)
    runs = sum(c["times"] for c in found)
    size = readable(sum(c["bytes"] * c["times"] for c in found))
    text = f"{kind} over {'+'.join(axes) or 'no axis'}: {runs} in the program, {size}"
    nobody = "none in the plan" + (
        ": of the projections and their gradients" if job.module or job.block else ""
    )
    planned = f"{readable(sum(c['bytes'] for c in named))} in the plan" if named else nobody
    return f"{text}{_overlap(found)} ({planned})"


def _same(listed: list[dict[str, Any]], kind: str, axes: tuple[str, ...]) -> list[dict[str, Any]]:
    return [c for c in listed if (c["kind"], tuple(c["axes"])) == (kind, axes)]


def _overlap(found: list[dict[str, Any]]) -> str:
    """Say how many run beside a kernel, and how many are waited for."""
    if not found:
        return ""
    overlapped = sum(c["times"] for c in found if c["is_overlapped"])
    waiting = sum(c["times"] for c in found if not c["is_async"])
    waited = f", {waiting} waited for on the spot" if waiting else ""
    return f", {overlapped} overlapped with a kernel{waited}"


# ---- what went wrong -----------------------------------------------------------------------------


def _failure(outcome: Outcome) -> str:
    if outcome.ending == "refused":
        return f"{outcome.message}\nrefused"
    if outcome.ending == "timeout":
        return f"{outcome.message}: raise --time-limit, or compile a shorter shape\nnot compiled"
    if outcome.ending == "crashed":
        return f"{outcome.message}\nnot compiled"
    return f"{_shortened(outcome.message)}\n{_verdict(outcome.message)}"


def _verdict(message: str) -> str:
    if "vmem" in message.lower():
        return "does not fit VMEM: smaller flash_block_sizes"
    memory = "RESOURCE_EXHAUSTED" in message or "hbm" in message.lower()
    return _TOO_MUCH if memory else "does not compile"


_TOO_MUCH = "does not fit: `maxattn check` with the same shape lists what helps"


def _shortened(message: str) -> str:
    """Keep the compiler's sentences and leave out its listings of buffers and traces."""
    kept = re.split(r"\n\s*\n|\n={3,}|\nLargest program allocations", message.strip())[0]
    return kept if len(kept) <= 1200 else f"{kept[:600]} ... {kept[-600:]}"
