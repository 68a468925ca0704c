"""The lines of `maxattn compile --estimate`: each one ends with the words that nothing ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from maxattn.context_parallel.base import readable
from maxattn.devices import Machine, device_of
from maxattn.tools.compile.job import Outcome
from maxattn.tools.estimate.kernel import KernelEstimate

Spans = list[tuple[int, tuple[float, float]]]
"""Calls, and the seconds of one, fast and slow end."""
FULLEST = 3  # slots, and operations without a time, that a line names
_MOVES = ("VLOAD:FILL", "VSTORE:SPILL")  # parts of VLOAD and VSTORE


def estimate_lines(outcome: Outcome, layers: int = 1) -> list[str]:
    """Write the estimate of an outcome, one line a statement; none where none was made.

    Args:
        outcome: of a compile.
        layers: how many of what was compiled a step runs.
    """
    made = outcome.estimate
    if not made or "refused" in made:
        return made.get("refused", "").splitlines()
    kernels = [_read(values) for values in made["kernels"]]
    attention, xla = made.get("attention", ()), made["xla_seconds"]
    lines = [line for alike in _alike(kernels) for line in _kernel(*alike)]
    for one in attention:
        calls = f" a call, {one['calls']} calls" if one["calls"] > 1 else ""
        lines.append(f"kernel  self-attention's {one['name']}: {_span(one['seconds'])} ms{calls}")
    passages = _passages(outcome)
    # The longest of each kind and axes.
    longest = {(p.kind, p.axes): p for p in sorted(passages, key=lambda p: p.seconds)}
    lines += [_link(passage, kernels) for passage in longest.values()]
    if each := ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in made["xla_longest"]):
        lines.append(f"xla     the longest of its own operations, in ms: {each}")
    spans = [(k.calls, k.seconds) for k in kernels]
    spans += [(one["calls"], one["seconds"]) for one in attention]
    lacks = ["transfers", *(["cross-attention's kernel"] if "attention" in made else [])]
    if names := made["xla_unknown"]:
        more = f" and {len(names) - FULLEST} more" if len(names) > FULLEST else ""
        listed = f"{', '.join(names[:FULLEST])}{more}"
        lacks.append(f"operations that libtpu gives no time for ({listed})")
    fast, slow = (sum(calls * seconds[end] for calls, seconds in spans) for end in (0, 1))
    own = f"kernels {_span((fast, slow))}" if spans else "no Pallas kernel"
    parts = f"{own}, XLA's own operations {1e3 * xla:.3g}"
    total = _span((fast + xla, slow + xla))
    lines.append(f"whole   {total} ms: {parts}; {' and '.join(lacks)} are not in it")
    if layers > 1:
        waiting = (p.times * p.seconds for p in passages if not p.is_overlapped)
        lines.append(_step(fast + xla, slow + xla, sum(waiting), layers))
    return [f"  {line}; {made['how']}" for line in lines]


def is_refused(estimate: dict[str, Any]) -> bool:
    """Tell whether an estimate was asked for and could not be made."""
    return "refused" in estimate


# ---- kernels -------------------------------------------------------------------------------------


def _read(values: dict[str, Any]) -> KernelEstimate:
    """Read what the compiler's process wrote as JSON, which has lists for tuples."""

    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return KernelEstimate(**{key: tuples(value) for key, value in values.items()})


def _alike(kernels: list[KernelEstimate]) -> list[tuple[KernelEstimate, int]]:
    """Pair kernels with the number of their calls; those that differ in nothing printed are one."""
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
    yield f"kernel  {kernel.name}: {_span(kernel.seconds)} ms{runs}{rate}"
    cores = f" on {kernel.cores} of {kernel.of_cores} cores" if kernel.of_cores > 1 else ""
    cycles = _ends(*(f"{end:.0f}" for end in kernel.cycles))
    yield f"steps   {kernel.steps}{cores}, {cycles} cycles each{_tiles(kernel)}"
    own = {name: share for name, share in kernel.slots if name not in _MOVES}
    order = sorted(own, key=lambda name: -own[name])[:FULLEST]
    slots = ", ".join(f"{name} {own[name]:.0%}" for name in order)
    if kernel.hbm:
        share = kernel.hbm / kernel.hbm_rate / kernel.seconds[0]
        hbm = f"; HBM {readable(kernel.hbm)} a call, {share:.0%} of its rate"
    yield f"binds   {slots}; a step spills {kernel.spills} registers{hbm}"


def _tiles(kernel: KernelEstimate) -> str:
    if not kernel.block:
        return "; every one priced whole"
    tiles = "; tiles of {} x {}".format(*kernel.block)
    if kernel.is_bound:
        return f"{tiles}, every one priced with the mask: which are visited is not known"
    skipped = max(0.0, 1 - kernel.full - kernel.masked)
    shares = {"full": kernel.full, "masked": kernel.masked, "skipped": skipped}
    return f"{tiles}, " + ", ".join(f"{share:.0%} {what}" for what, share in shares.items())


# ---- transfers -----------------------------------------------------------------------------------


class Passage(NamedTuple):
    """Hold one transfer of a compiled program.

    Args:
        kind, axes: what it is, and the mesh axes that it runs over.
        times: how often it runs.
        seconds: of one, at the published rate of the links.
        kernels: names of the kernels that run while its data is under way.
        is_overlapped: whether one does, or a product.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    seconds: float
    kernels: tuple[str, ...]
    is_overlapped: bool


def _passages(outcome: Outcome) -> list[Passage]:
    machine = device_of(outcome.device_kind, "tpu").machine
    assert machine is not None, outcome.device_kind
    return [passage_of(found, machine, outcome.mesh) for found in outcome.found]


def passage_of(found: Mapping[str, Any], machine: Machine, sizes: Mapping[str, int]) -> Passage:
    """Price a transfer of `Outcome.found`.

    Args:
        found: kind, axes, bytes that a device receives, times and kernels.
        machine: whose links.
        sizes: of the mesh's axes.
    """
    kind, axes = found["kind"], tuple(found["axes"])
    ways = prod(sizes[axis] for axis in axes)
    if kind == "ppermute" or ways < 2:
        rate = machine.neighbour
    elif kind in ("all_to_all", "ragged_all_to_all"):
        rate = machine.exchanged(ways)
    else:  # a sum's data goes around twice
        rate = machine.gathered(ways) / (2 if kind == "psum" else 1)
    beside = tuple(found["kernels"]), found["is_overlapped"]
    return Passage(kind, axes, found["times"], found["bytes"] / rate, *beside)


def _link(passage: Passage, kernels: list[KernelEstimate]) -> str:
    beside = sum(k.seconds[0] for k in kernels if k.name in passage.kernels)
    what = f"link    {passage.kind} over {'+'.join(passage.axes)}: {1e3 * passage.seconds:.3g} ms"
    covered = "at least as long" if beside >= passage.seconds else "shorter"
    kernel = f", the kernel beside it {1e3 * beside:.3g} ms: {covered}" if beside else ""
    return f"{what} for the longest at the published rate{kernel}"


def _step(fast: float, slow: float, waits: float, layers: int) -> str:
    """Add up the layers of a step, and the exposed transfers."""
    times = _ends(*(f"{layers * each:.3g}" for each in (fast, slow + waits)))
    links = f"at most {layers * waits:.3g} s of it for links"
    return f"step    {times} s: {layers} times the whole, {links}; all else of a step is not in it"


def _span(seconds: tuple[float, float]) -> str:
    return _ends(*(f"{1e3 * each:.3g}" for each in seconds))


def _ends(low: str, high: str) -> str:
    """Write an interval; a single value where its ends are written alike."""
    return low if low == high else f"{low} to {high}"
