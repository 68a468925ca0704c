"""What `maxattn tune` prints of measured kernels: their times, who wins, what that is worth."""

from __future__ import annotations

from typing import Any

from maxattn.config.write import yaml_of
from maxattn.kernels.auto.tuned_order import in_digits, joined
from maxattn.tools.bench.jobs import config_of
from maxattn.tools.tune.kernel_candidates import KernelCandidates
from maxattn.tuned import in_ms
from maxattn.tuned.kernels import milliseconds_of

PASSES = {"forward": "forward_ms", "backward": "backward_ms"}
Record = dict[str, Any]
"""A measurement of kernels, as the file holds it."""


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
        ms = [milliseconds(record, what, name) for what in passes]
        cells = "".join((in_digits(x) if x else "-").rjust(14) for x in ms)
        failed = record["failed"].get(name)
        print(f"  {name:<18}{cells}" + (f"  does not run: {failed}" if failed else ""))
    before = "\n  measured before; --again times it anew" if is_old else ""
    print(f"{left_out(found)}{before}"[1:], end="\n" if left_out(found) or before else "")


def say_winner(record: Record, taken: str, own: str, is_kept: bool) -> None:
    """Say what is fastest, and what `auto` loses without the measurement.

    Args:
        record: with times.
        taken: the kernel that a plan takes by them, "a/b" for two.
        own: the kernel that it takes without them.
        is_kept: whether plans will find them.
    """
    ms, both = total(record, taken), "forward and backward" if record["backward_ms"] else "forward"
    if ms is None:
        print("  none of them runs")
        return
    print(f"  fastest {_in_passes(record, taken)}: {in_ms(ms)} {both}")
    print(f"  {_without(record, own, taken)}")
    if is_kept:
        print("  plans on this machine take it under attention: auto")


def say_yaml(record: Record, role: str, is_kept: bool) -> None:
    """Print what names the one kernel that is fastest: several processes read no measurements."""
    totals = {name: total(record, name) for name in record["forward_ms"]}
    known = {name: ms for name, ms in totals.items() if ms}
    if known:
        where = "for several processes, " if is_kept else ""
        print(f"  {where}to name one kernel:\n{_yaml(min(known, key=lambda n: known[n]), role)}")


def _without(record: Record, own: str, taken: str) -> str:
    same = _in_passes(record, own) == _in_passes(record, taken)
    ms, other = total(record, taken), total(record, own)
    if same or not ms:
        return "auto takes the same without it"
    said = f"without it auto takes {_in_passes(record, own)}"
    if other is None:
        return f"{said}, which was not timed"
    return f"{said}: {in_ms(other)}, {other / ms:.2f} times as long"


def _in_passes(record: Record, name: str) -> str:
    """Name the kernels of the passes that were timed."""
    first, *_, last = [*name.split("/")] * 2
    return joined(first, last) if record["backward_ms"] else first


def total(record: Record, name: str) -> float | None:
    """Return the milliseconds of a kernel, or of a pair, in the passes that were timed."""
    first, *_, last = [*name.split("/")] * 2
    parts = zip(PASSES, (first, last), strict=True)
    times = [milliseconds(record, what, part) for what, part in parts if record[PASSES[what]]]
    return sum(x for x in times if x) if times and all(times) else None


def milliseconds(record: Record, what: str, name: str) -> float | None:
    """Return the time of a kernel's pass, or None where it has none."""
    rounds = record[PASSES[what]].get(name)
    return milliseconds_of(tuple(rounds)) if rounds else None


def _yaml(kernel: str, role: str) -> str:
    config = config_of(kernel)
    if role == "cross":
        config = config.replace(attention="auto", cross_attention=config.attention)
    return "\n".join(f"    {line}" for line in yaml_of(config).splitlines())
