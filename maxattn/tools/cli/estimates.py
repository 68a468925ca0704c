"""What `maxattn compile --estimate` prints: every line says that nothing ran."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from maxattn.context_parallel.base import readable
from maxattn.devices import device_of
from maxattn.tools.compile.job import Outcome
from maxattn.tools.estimate.kernel import KernelEstimate
from maxattn.tools.estimate.links import Passage, passage_of

Spans = list[tuple[int, tuple[float, float]]]
"""Calls, and the seconds of one, fast and slow end."""
FULLEST = 3  # slots that a line names
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
    lines = [line for alike in _alike(kernels) for line in _kernel(*alike)]
    lines += [_attention(one) for one in made.get("attention", ())]
    lines += [_link(passage, kernels) for passage in _passages(outcome)]
    lines += _longest(made["xla_longest"])
    spans = [(k.calls, k.seconds) for k in kernels]
    spans += [(one["calls"], one["seconds"]) for one in made.get("attention", ())]
    lacks = ["transfers", *(["cross-attention's kernel"] if "attention" in made else [])]
    lines.append(_whole(spans, made["xla_seconds"], [*lacks, *_unknown(made["xla_unknown"])]))
    if layers > 1:
        lines.append(_step(spans, made["xla_seconds"], outcome, layers))
    return [f"  {line}; {made['how']}" for line in lines]


def _read(values: dict[str, Any]) -> KernelEstimate:
    """Read what the compiler's process wrote as JSON, which has lists for tuples."""
    return KernelEstimate(**{key: _tuples(value) for key, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _alike(kernels: list[KernelEstimate]) -> list[tuple[KernelEstimate, int]]:
    """Pair kernels with the number of their calls; those that differ in nothing printed are one."""
    found: dict[KernelEstimate, int] = {}
    for kernel in kernels:
        name = kernel.name.rpartition(".")[0] if kernel.name[-1].isdecimal() else kernel.name
        one = kernel._replace(name=name, calls=1)
        found[one] = found.get(one, 0) + kernel.calls
    return list(found.items())


def _kernel(kernel: KernelEstimate, calls: int) -> Iterator[str]:
    runs = f" a call, {calls} calls" if calls > 1 else ""
    yield f"kernel  {kernel.name}: {_span(kernel.seconds)} ms{runs}{_rate(kernel)}"
    cores = f" on {kernel.cores} of {kernel.of_cores} cores" if kernel.of_cores > 1 else ""
    cycles = _ends(*(f"{end:.0f}" for end in kernel.cycles))
    yield f"steps   {kernel.steps}{cores}, {cycles} cycles each{_tiles(kernel)}"
    yield f"binds   {_slots(kernel)}; a step spills {kernel.spills} registers{_hbm(kernel)}"


def _rate(kernel: KernelEstimate) -> str:
    if not kernel.flops:
        return ""
    slow, fast = sorted(kernel.flops / seconds for seconds in kernel.seconds)
    rates, shares = (
        _ends(f"{slow / unit:.0f}", f"{fast / unit:.0f}") for unit in (1e12, kernel.peak / 100)
    )
    return f", {rates} TFLOP/s, {shares}% of the peak"


def _tiles(kernel: KernelEstimate) -> str:
    if not kernel.block:
        return "; every one priced whole"
    tiles = "; tiles of {} x {}".format(*kernel.block)
    if kernel.is_bound:
        return f"{tiles}, every one priced with the mask: which are visited is not known"
    skipped = max(0.0, 1 - kernel.full - kernel.masked)
    shares = {"full": kernel.full, "masked": kernel.masked, "skipped": skipped}
    return f"{tiles}, " + ", ".join(f"{share:.0%} {what}" for what, share in shares.items())


def _slots(kernel: KernelEstimate) -> str:
    own = {name: share for name, share in kernel.slots if name not in _MOVES}
    order = sorted(own, key=lambda name: -own[name])[:FULLEST]
    return ", ".join(f"{name} {own[name]:.0%}" for name in order)


def _hbm(kernel: KernelEstimate) -> str:
    if not kernel.hbm:
        return ""
    share = kernel.hbm / kernel.hbm_rate / kernel.seconds[0]
    return f"; HBM {readable(kernel.hbm)} a call, {share:.0%} of its rate"


def _passages(outcome: Outcome) -> list[Passage]:
    """Price the transfers, the longest of each kind and axes."""
    machine = device_of(outcome.device_kind, "tpu").machine
    assert machine is not None, outcome.device_kind
    every = [passage_of(found, machine, outcome.mesh) for found in outcome.found]
    every.sort(key=lambda p: p.seconds)
    return list({(p.kind, p.axes): p for p in every}.values())


def _link(passage: Passage, kernels: list[KernelEstimate]) -> str:
    beside = sum(k.seconds[0] for k in kernels if k.name in passage.kernels)
    what = f"link    {passage.kind} over {'+'.join(passage.axes)}: {1e3 * passage.seconds:.3g} ms"
    covered = "at least as long" if beside >= passage.seconds else "shorter"
    kernel = f", the kernel beside it {1e3 * beside:.3g} ms: {covered}" if beside else ""
    return f"{what} for the longest at the published rate{kernel}"


def _longest(operations: list[tuple[str, float]]) -> list[str]:
    """Name the operations of XLA's own that take longest."""
    each = ", ".join(f"{name} {1e3 * seconds:.3g}" for name, seconds in operations)
    return [f"xla     the longest of its own operations, in ms: {each}"] if each else []


def _attention(one: dict[str, Any]) -> str:
    calls = f" a call, {one['calls']} calls" if one["calls"] > 1 else ""
    return f"kernel  self-attention's {one['name']}: {_span(one['seconds'])} ms{calls}"


def _sum(spans: Spans) -> tuple[float, float]:
    """Add up calls, fast and slow end."""
    fast, slow = (sum(calls * seconds[end] for calls, seconds in spans) for end in (0, 1))
    return fast, slow


def _whole(spans: Spans, xla: float, lacks: list[str]) -> str:
    fast, slow = _sum(spans)
    own = f"kernels {_span((fast, slow))}" if spans else "no Pallas kernel"
    parts = f"{own}, XLA's own operations {1e3 * xla:.3g}"
    left_out = " and ".join(lacks)
    return f"whole   {_span((fast + xla, slow + xla))} ms: {parts}; {left_out} are not in it"


def _step(spans: Spans, xla: float, outcome: Outcome, layers: int) -> str:
    """Add up what a step's layers take, and the transfers that no kernel runs beside."""
    machine = device_of(outcome.device_kind, "tpu").machine
    assert machine is not None, outcome.device_kind
    fast, slow = (end + xla for end in _sum(spans))
    sent = [(passage_of(f, machine, outcome.mesh), f["is_overlapped"]) for f in outcome.found]
    waits = sum(p.times * p.seconds for p, is_overlapped in sent if not is_overlapped)
    times = _ends(*(f"{layers * each:.3g}" for each in (fast, slow + waits)))
    links = f"at most {layers * waits:.3g} s of it for links"
    return f"step    {times} s: {layers} times the whole, {links}; all else of a step is not in it"


def _unknown(names: list[str]) -> list[str]:
    """Say which operations have no time in the compiled program."""
    if not names:
        return []
    more = f" and {len(names) - FULLEST} more" if len(names) > FULLEST else ""
    return [f"operations that libtpu gives no time for ({', '.join(names[:FULLEST])}{more})"]


def _span(seconds: tuple[float, float]) -> str:
    return _ends(*(f"{1e3 * each:.3g}" for each in seconds))


def _ends(low: str, high: str) -> str:
    """Write an interval; a single value where its ends are written alike."""
    return low if low == high else f"{low} to {high}"


def is_refused(estimate: dict[str, Any]) -> bool:
    """Tell whether an estimate was asked for and could not be made."""
    return "refused" in estimate
