"""What `maxattn tune` prints of measured kernels: their times, who wins, what that changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from maxattn.config.write import yaml_of
from maxattn.kernels.auto.tuned_order import in_digits, joined
from maxattn.tools.bench.kernels import config_of
from maxattn.tools.tune.candidates import KernelCandidates
from maxattn.tuned import in_ms
from maxattn.tuned.kernels import milliseconds_of

PASSES = {"forward": "forward_ms", "backward": "backward_ms"}
Record = dict[str, Any]
"""A measurement of kernels, as the file holds it."""


class KernelOutcome(NamedTuple):
    """Hold what a measurement changes.

    Attributes:
        call: the name of its shape.
        own, taken: the kernel that `auto` takes without the measurement, and with it.
        before, now: their milliseconds; None where one was not timed.
    """

    call: str
    own: str
    taken: str
    before: float | None
    now: float | None


def outcome(call: str, record: Record, own: str, taken: str) -> KernelOutcome:
    """Compare the kernels of two plans; "a/b" is the forward of a and the backward of b."""
    before, now = total(record, own), total(record, taken)
    return KernelOutcome(call, _in_passes(record, own), _in_passes(record, taken), before, now)


def left_out(found: KernelCandidates) -> str:
    """Say a line of each kernel that can run on such a device and is not timed."""
    return "".join(f"\n  not timed: {name}: {why}" for name, why in found.left_out.items())


def say_lost(record: Record) -> None:
    """Say that the device stopped answering."""
    name, why = next(reversed(record["failed"].items()), ("a kernel", "it is not known which"))
    print(f"  {record['device_kind']} stopped answering after {name} failed: {why}")
    print("  start the command again: that kernel is then left out")


def say_table(record: Record, found: KernelCandidates, is_old: bool) -> None:
    """Print the times of every kernel, and who has none."""
    passes = [what for what, key in PASSES.items() if record[key]]
    print("  " + "kernel".ljust(18) + "".join(f"{what} ms".rjust(14) for what in passes))
    for name in found.built:
        ms = [_milliseconds(record, what, name) for what in passes]
        cells = "".join((in_digits(x) if x else "-").rjust(14) for x in ms)
        failed = record["failed"].get(name)
        print(f"  {name:<18}{cells}" + (f"  does not run: {failed}" if failed else ""))
    before = "\n  measured before; --again times it anew" if is_old else ""
    print(f"{left_out(found)}{before}"[1:], end="\n" if left_out(found) or before else "")


def say_winner(its: KernelOutcome, record: Record, role: str, is_kept: bool) -> None:
    """Say what is fastest, and what `auto` loses without the measurement.

    Args:
        its: what the measurement changes.
        record: with times.
        role: "self" or "cross".
        is_kept: whether plans will find the measurement.
    """
    if its.now is None:
        print("  none of them runs")
        return
    passes = "forward and backward" if record["backward_ms"] else "forward"
    print(f"  fastest {its.taken}: {in_ms(its.now)} {passes}")
    if its.own == its.taken:
        print("  auto takes the same without it")
    elif its.before is None:
        print(f"  without it auto takes {its.own}, which was not timed")
    else:
        slower = f"{in_ms(its.before)}, {its.before / its.now:.2f} times as long"
        print(f"  without it auto takes {its.own}: {slower}")
    if is_kept:
        print("  plans on this machine take it under attention: auto")
    # Several processes read no measurements: one kernel is named for them.
    totals = {name: total(record, name) for name in record["forward_ms"]}
    known = {name: ms for name, ms in totals.items() if ms}
    if known:
        config = config_of(min(known, key=lambda name: known[name]))
        if role == "cross":
            config = config.replace(attention="auto", cross_attention=config.attention)
        where = "for several processes, " if is_kept else ""
        print(f"  {where}to name one kernel: {', '.join(yaml_of(config).splitlines())}")


def say_changes(outcomes: Sequence[KernelOutcome]) -> None:
    """Print what the measurements of several calls change."""
    changed = [its for its in outcomes if its.now and its.own != its.taken]
    print(f"\nchanged: {len(changed)} of {len(outcomes)} calls")
    if changed:
        print(f"  {'call':<22}{'without':<26}{'ms':>9}  {'now':<26}{'ms':>9}")
    for call, own, taken, before, now in changed:
        ms = [in_digits(x) if x else "-" for x in (before, now)]
        print(f"  {call:<22}{own:<26}{ms[0]:>9}  {taken:<26}{ms[1]:>9}")


def _in_passes(record: Record, name: str) -> str:
    """Name the kernels of the passes that were timed."""
    first, *_, last = [*name.split("/")] * 2
    return joined(first, last) if record["backward_ms"] else first


def total(record: Record, name: str) -> float | None:
    """Return the milliseconds of a kernel, or of a pair, in the passes that were timed."""
    first, *_, last = [*name.split("/")] * 2
    parts = zip(PASSES, (first, last), strict=True)
    times = [_milliseconds(record, what, part) for what, part in parts if record[PASSES[what]]]
    return sum(x for x in times if x) if times and all(times) else None


def _milliseconds(record: Record, what: str, name: str) -> float | None:
    rounds = record[PASSES[what]].get(name)
    return milliseconds_of(tuple(rounds)) if rounds else None
