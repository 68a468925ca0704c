"""`maxattn compile`: compile for a TPU without having one; report memory, transfers and estimates.

Each line of an estimate ends by stating that nothing ran.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

from maxattn.block_sizes.estimated.choose import in_ms
from maxattn.block_sizes.estimated.measured import beside_measured
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.config.errors import plain
from maxattn.config.numbers import MOST_DEVICES, whole
from maxattn.config.target_names import read_target
from maxattn.context_parallel.base import readable
from maxattn.devices import DEVICES, Machine, device_of, memory_of
from maxattn.errors import ConfigError, InputError, MeshError
from maxattn.tools.cli.inputs import read_source, shapes_of
from maxattn.tools.cli.progress import progress
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.kernel_file import name_of, read_kernel_file, read_visited
from maxattn.tools.estimate.bundles import FILLS, SPILLS
from maxattn.tools.estimate.kernel import KernelEstimate
from maxattn.tools.estimate.xla import PRODUCTS, WORDS


def run(args: argparse.Namespace) -> int:
    """Compile each shape and print the outcome."""
    source, topology = read_source(args), topology_of(args.target)
    if whole(args.slices, most=MOST_DEVICES) is None or (args.slices > 1 and args.devices):
        rule = "it must be at least 1, and with several slices all devices are used"
        raise MeshError("slices", plain(args.slices), rule, "write --slices 2 without --devices")
    _check_block(args)
    file = _kernel_file(args)
    how = args.train, args.module, args.devices, args.slices, args.estimate, args.block, args.layers
    outcomes = []
    for shape in shapes_of(args, source):
        job = CompileJob(topology, source.config, shape, *how, *file)
        with progress():
            outcomes.append(run_in_child(job, args.time_limit))
        if not args.json:
            blank = "\n" if len(outcomes) > 1 else ""
            print(blank + report(job, outcomes[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    return int(not all(fits(one) and "refused" not in one.estimate for one in outcomes))


def _check_block(args: argparse.Namespace) -> None:
    if args.block and (whole(args.block) is None or args.module):
        rule = "the feed-forward width must be above 0, and --module is a part of --block"
        raise InputError("--block", plain(args.block), rule, "write --block 13824 without --module")
    if whole(args.layers) is None or (args.layers > 1 and not args.estimate):
        rule = "it must be at least 1, and it applies only with --estimate"
        raise InputError("--layers", plain(args.layers), rule, "write --layers 40 --estimate")


def _kernel_file(args: argparse.Namespace) -> tuple[str, bool, tuple[int, ...]]:
    """Read the options of a kernel file: its name, whether its arrays are flat, visited tiles."""
    given = "--visited" if args.visited else "--layout" if args.layout == "flat" else ""
    if given and not args.kernel_file:
        rule = "it describes the function of --kernel-file, and none is given"
        raise InputError(given, plain(args.visited or args.layout), rule, f"leave {given} out")
    file = read_kernel_file(args.kernel_file) if args.kernel_file else ""
    return file, args.layout == "flat", read_visited(args.visited) if args.visited else ()


def topology_of(target: str) -> str:
    """Return libtpu's name of a target's topology; it is one host if the target names no chips."""
    name = read_target(target)
    if DEVICES[name.kind].platform != "tpu":
        rule = f"it must be a TPU, and {name.kind} is not one"
        remedy = "use explain or check, which need no compiler, or name a TPU, such as v5p:2x2x1"
        raise ConfigError("target", target, rule, remedy)
    return name.topology


def fits(outcome: Outcome) -> bool:
    """Return whether the program compiled, and fits in a device's memory."""
    memory = memory_of(outcome.device_kind) or float("inf")
    return outcome.ending == "compiled" and outcome.needed <= memory


# ---- the report ----------------------------------------------------------------------------------

_TOO_MUCH = "does not fit: `maxattn check` with the same shape lists what helps"
_MEMORY = {"arguments": "argument", "temporaries": "temp", "outputs": "output"}


def report(job: CompileJob, outcome: Outcome) -> str:
    """Write an outcome as text."""
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
            waited = f", {waiting} synchronous" if waiting else ""
            text += f", {overlapped} overlapped with a kernel{waited}"
        owner = ": they belong to the projections" if job.module or job.block else ""
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
    # The compiler's message, without its listings of buffers and traces.
    kept = re.split(r"\n\s*\n|\n={3,}|\nLargest program allocations", message.strip())[0]
    kept = kept if len(kept) <= 1200 else f"{kept[:600]} ... {kept[-600:]}"
    if "vmem" in message.lower():
        return f"{kept}\ndoes not fit VMEM: set smaller flash_block_sizes"
    is_memory = "RESOURCE_EXHAUSTED" in message or "hbm" in message.lower()
    return f"{kept}\n{_TOO_MUCH if is_memory else 'does not compile'}"


# ---- estimates -----------------------------------------------------------------------------------

FULLEST = 3  # most slots that a line names
LARGE = 41_000
LARGE_NOTE = (
    f"; MaxDiffusion measured a program of more than {LARGE:,} as 2.1 times slower, and others"
    " measured one of 46,626 on v7x at full speed: time it, or set smaller flash_block_sizes"
)
_MOVES = FILLS, SPILLS  # VLOAD and VSTORE count these slots too


def estimate_lines(outcome: Outcome, layers: int = 1) -> list[str]:
    """Write the estimate of an outcome, if there is one, for a step of `layers` layers."""
    made = outcome.estimate
    if not made or "refused" in made:
        return made.get("refused", "").splitlines()
    kernels = [_read(values) for values in made["kernels"]]
    attention, xla = made.get("attention", ()), made["xla_seconds"]
    lines = [line for alike in _alike(kernels) for line in _kernel(*alike)]
    for one in attention:
        calls = f" a call, {one['calls']} calls" if one["calls"] > 1 else ""
        lines.append(f"kernel  {one['name']}: {in_ms(Seconds(*one['seconds']))}{calls}")
    machine = device_of(outcome.device_kind, "tpu").machine
    assert machine is not None, outcome.device_kind
    sent = [(_sent_in(found, machine, outcome.mesh), found) for found in outcome.found]
    # The longest transfer of each kind and axes.
    longest = {(f["kind"], *f["axes"]): (s, f) for s, f in sorted(sent, key=lambda one: one[0])}
    lines += [_link(*one, kernels) for one in longest.values()]
    lines += [_of_xla(one) for one in made["xla"] if one["seconds"]]
    spans = [(k.calls, k.seconds) for k in kernels]
    spans += [(one["calls"], one["seconds"]) for one in attention]
    lacks = ["transfers"]
    if attention and not any(one["name"].startswith("cross") for one in attention):
        lacks.append("cross-attention's kernel")
    fast, slow = (sum(calls * seconds[end] for calls, seconds in spans) for end in (0, 1))
    own = (
        f"kernels {in_ms(Seconds(fast, slow)).removesuffix(' ms')}" if spans else "no Pallas kernel"
    )
    parts = f"{own}, XLA's own operations {1e3 * xla:.3g}"
    total = in_ms(Seconds(fast + xla, slow + xla))
    lines.append(f"whole   {total}: {parts}; {' and '.join(lacks)} are not in it")
    if spans:
        lines.append(f"error   {beside_measured(outcome.device_kind)}")
    if layers > 1:
        waiting = (f["times"] * seconds for seconds, f in sent if not f["is_overlapped"])
        lines.append(_step(fast + xla, slow + xla, sum(waiting), layers))
    return [f"  {line}; {made['how']}" for line in lines]


# ---- kernels -------------------------------------------------------------------------------------


def _read(values: dict[str, Any]) -> KernelEstimate:
    """Read the compiler's JSON, which has lists in place of tuples."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return KernelEstimate(**{key: tuples(value) for key, value in values.items()})


def _alike(kernels: list[KernelEstimate]) -> list[tuple[KernelEstimate, int]]:
    """Count the calls of each kernel; merge kernels whose lines would be equal."""
    found: dict[KernelEstimate, int] = {}
    for kernel in kernels:
        name = kernel.name.rpartition(".")[0] if kernel.name[-1].isdecimal() else kernel.name
        one = kernel._replace(name=name, calls=1)
        found[one] = found.get(one, 0) + kernel.calls
    return list(found.items())


def _kernel(kernel: KernelEstimate, calls: int) -> Iterator[str]:
    runs, rate, hbm = f" a call, {calls} calls" if calls > 1 else "", "", ""
    if kernel.flops:
        slow, fast = sorted(kernel.flops / seconds for seconds in kernel.seconds)
        rates, shares = (
            _ends(f"{slow / unit:.0f}", f"{fast / unit:.0f}") for unit in (1e12, kernel.peak / 100)
        )
        rate = f", {rates} TFLOP/s, {shares}% of the peak"
    yield f"kernel  {kernel.name}: {in_ms(Seconds(*kernel.seconds))}{runs}{rate}"
    cores = f" on {kernel.cores} of {kernel.of_cores} cores" if kernel.of_cores > 1 else ""
    cycles = cycles_text(kernel.cycles)
    yield f"steps   {kernel.steps}{cores}, {cycles}{_tiles(kernel)}"
    own = {name: share for name, share in kernel.slots if name not in _MOVES}
    order = sorted(own, key=lambda name: -own[name])[:FULLEST]
    slots = ", ".join(f"{name} {own[name]:.0%}" for name in order)
    if kernel.hbm:
        share = kernel.hbm / kernel.hbm_rate / kernel.seconds[0]
        hbm = f"; HBM {readable(kernel.hbm)} a call, {share:.0%} of its rate"
    yield f"binds   {slots}; a step spills {kernel.spills} registers{hbm}"
    large = LARGE_NOTE if kernel.bundles > LARGE else ""
    yield f"program {kernel.bundles:,} bundles, at most {kernel.longest:,} in a step{large}"


def _tiles(kernel: KernelEstimate) -> str:
    if not kernel.block and kernel.full == 1:
        return "; every step is priced in full"
    tiles = "; tiles of {} x {}".format(*kernel.block) if kernel.block else "; tiles"
    if kernel.is_bound:
        return f"{tiles}, all priced with the mask, since the visited ones are not known"
    skipped = max(0.0, 1 - kernel.full - kernel.masked)
    shares = {"full": kernel.full, "masked": kernel.masked, "skipped": skipped}
    return f"{tiles}, " + ", ".join(f"{share:.0%} {what}" for what, share in shares.items())


def _of_xla(kind: dict[str, Any]) -> str:
    what = f"{kind['bytes'] / 1e9:.3g} GB"
    if kind["flops"]:
        what = f"{kind['flops'] / 1e12:.3g} TFLOP at {PRODUCTS:.0%} of the peak"
    lacks = f", {kind['without_cycles']} operations without" if kind["without_cycles"] else ""
    longest = ", ".join(f"{what} {name} {1e3 * each:.3g}" for name, what, each in kind["longest"])
    cycles = f"{1e3 * kind['by_cycles']:.3g} ms by XLA's own cycles{lacks}"
    words = f"{WORDS[kind['kind']]}: {1e3 * kind['seconds']:.3g} ms, {what} ({cycles})"
    return f"xla     {words}; longest, in ms: {longest}"


# ---- transfers -----------------------------------------------------------------------------------


def _sent_in(found: Mapping[str, Any], machine: Machine, sizes: Mapping[str, int]) -> float:
    """Return the seconds of one run of a transfer of `Outcome.found` at the published rate."""
    kind, ways = found["kind"], prod(sizes[axis] for axis in found["axes"])
    if kind == "ppermute" or ways < 2:
        rate = machine.neighbour
    elif kind in ("all_to_all", "ragged_all_to_all"):
        rate = machine.exchanged(ways)
    else:  # a psum sends its data around twice
        rate = machine.gathered(ways) / (2 if kind == "psum" else 1)
    return found["bytes"] / rate


def _link(seconds: float, found: Mapping[str, Any], kernels: list[KernelEstimate]) -> str:
    beside = sum(k.seconds[0] for k in kernels if k.name in found["kernels"])
    what = f"link    {found['kind']} over {'+'.join(found['axes'])}: the longest takes"
    covered = "at least as long" if beside >= seconds else "shorter"
    kernel = f"; the kernel beside it takes {1e3 * beside:.3g} ms, {covered}" if beside else ""
    return f"{what} {1e3 * seconds:.3g} ms at the published rate{kernel}"


def _step(fast: float, slow: float, waits: float, layers: int) -> str:
    times = _ends(*(f"{layers * each:.3g}" for each in (fast, slow + waits)))
    links = f"at most {layers * waits:.3g} s of it for transfers"
    return f"step    {times} s: {layers} times the whole, {links}; other work is not counted"


def cycles_text(cycles: tuple[float, float]) -> str:
    """Write an interval of cycles of a step."""
    return f"{_ends(*(f'{end:,.0f}' for end in cycles))} cycles a step"


def _ends(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
