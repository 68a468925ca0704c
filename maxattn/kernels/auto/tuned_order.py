"""What `auto` tries first: the kernels that `maxattn tune` measured on this kind of device.

Forward and backward are chosen apart, as they were measured. A kernel that was no faster than the
noise of its rounds does not displace the one that `auto` takes without the measurement. A kernel
that cannot run any more, or did not run while it was measured, is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels import refusal
from maxattn.kernels.table import TABLE
from maxattn.target import Target
from maxattn.tuned.kernels import (
    CallTimes,
    Rounds,
    is_as_fast,
    key_of_kernels,
    milliseconds_of,
    settings_of,
    unmeasured_for,
)

HERE = "measured here by maxattn tune"
AGAIN = "run maxattn tune again"
PLAIN = ("memory_efficient", "dot_product")
Runs = Callable[[str], bool]


class TunedOrder(NamedTuple):
    """Hold what to try, in order, and why; who failed; what else to say."""

    names: tuple[str, ...]
    because: str
    failed: tuple[Reason, ...]
    notes: tuple[str, ...]


class _Picked(NamedTuple):
    """Hold what a pass runs, whether that was measured, and who is faster and cannot run."""

    name: str
    is_measured: bool
    faster: tuple[str, ...] = ()


class _Can(NamedTuple):
    """Answer which kernels can run a call now."""

    local: Call
    target: Target
    config: AttentionConfig

    def refused(self, name: str) -> bool:
        """Tell whether a kernel refuses the call."""
        deterministic = self.config.deterministic
        return refusal(name, self.local, self.target, deterministic) is not None

    def run(self, name: str) -> bool:
        """Tell whether what was measured under a name would run: flash without fa4-jax is cuDNN."""
        return name in TABLE and not self.refused(name) and not _is_without_fa4(name, self.target)


def tuned_order(
    local: Call, target: Target, config: AttentionConfig, usual: tuple[tuple[str, ...], str]
) -> TunedOrder | None:
    """Return what to try by measurements on the target; None where there are none of this call.

    Args:
        local: the call that one device computes.
        target: which has the measurements.
        config: its settings must be those of the measurement; `deterministic` refuses kernels.
        usual: what `auto` tries without them, and why.
    """
    times = times_for(local, target, config)
    if times is None:
        return None
    can, why = _Can(local, target, config), dict(times.failed)
    first, last = own_passes(usual[0], lambda name: name not in why and can.run(name))
    forward = _pick(times.forward, can, (first,))
    backward = _pick(times.backward, can, (last, forward.name))
    faster = dict.fromkeys((*forward.faster, *backward.faster))
    refused = tuple(name for name in faster if can.refused(name))
    others = [name for name in usual[0] if not {*name.split("/")} & {*why, *refused}]
    plain = (name for name in usual[0] if name in PLAIN)
    names = (*refused, joined(forward.name, backward.name), *others, *plain)
    because = _because(times, (forward, backward), can, usual[1])
    failed = tuple(_failed(name, text) for name, text in why.items() if name in TABLE)
    notes = (*_notes(times, target), *_lost(faster, target))
    return TunedOrder(tuple(dict.fromkeys(names)), because, failed, notes)


def times_for(local: Call, target: Target, config: AttentionConfig) -> CallTimes | None:
    """Return the last measurement of a call, before others that of the target's own versions."""
    if not target.kernel_times or unmeasured_for(local):
        return None
    key, settings = key_of_kernels(local), settings_of(config)
    same = [t for t in target.kernel_times if (t.call, t.settings) == (key, settings)]
    own = [times for times in same if dict(times.versions) == dict(target.packages)]
    return (own or same or [None])[-1]


def own_passes(names: Iterable[str], usable: Runs) -> tuple[str, str]:
    """Return the forward and the backward that `auto` takes of names it tries in order."""
    found = next((name for name in names if all(map(usable, name.split("/")))), "dot_product")
    first, *_, last = [*found.split("/")] * 2
    return first, last


def joined(forward: str, backward: str) -> str:
    """Name the forward of one kernel and the backward of another."""
    return forward if forward == backward else f"{forward}/{backward}"


def _is_without_fa4(name: str, target: Target) -> bool:
    from maxattn.kernels.flash import has_fa4

    return name == "flash" and target.platform == "gpu" and not has_fa4(target)


def _pick(rounds: Rounds, can: _Can, preferred: tuple[str, ...]) -> _Picked:
    """Pick the fastest that can run, or one of `preferred` that is as fast."""
    ranked = sorted(dict(rounds).items(), key=lambda each: milliseconds_of(each[1]))
    there = {name: ms for name, ms in ranked if can.run(name)}
    if not there:
        return _Picked(preferred[0], False)
    best = next(iter(there))
    found = (n for n in preferred if n in there and is_as_fast(there[n], there[best]))
    names = [name for name, _ in ranked]
    faster = (name for name in names[: names.index(best)] if name in TABLE)
    return _Picked(next(found, best), True, tuple(faster))


# ---- words ---------------------------------------------------------------------------------------


def _because(times: CallTimes, picked: tuple[_Picked, _Picked], can: _Can, usual: str) -> str:
    if not any(one.is_measured for one in picked):
        return usual
    both = zip(("forward", "backward"), (times.forward, times.backward), picked, strict=True)
    said = [f"{what} {_compared(rounds, one, can)}" for what, rounds, one in both if rounds]
    without = [
        f"{what} {one.name} as without it, {usual}"
        for what, one in zip(("forward", "backward"), picked, strict=True)
        if not one.is_measured
    ]
    return f"{HERE}: {'; '.join((*said, *without))}"


def _compared(rounds: Rounds, picked: _Picked, can: _Can) -> str:
    """Say the time of what runs, and of the next best that can run."""
    ms = {name: milliseconds_of(its) for name, its in rounds if can.run(name)}
    if not picked.is_measured:
        return "nothing that can run"
    others = sorted((name for name in ms if name != picked.name), key=lambda name: ms[name])
    beside = f", {others[0]} {in_digits(ms[others[0]])} ms" if others else ""
    own = f"{picked.name} {in_digits(ms[picked.name])} ms{beside}"
    is_tie = bool(others) and ms[others[0]] < ms[picked.name]
    return f"{own} (no faster than the noise)" if is_tie else own


def in_digits(ms: float) -> str:
    """Write milliseconds with three digits."""
    decimals = 3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:.{decimals}f}" if ms >= 0.01 else f"{ms:.2g}"


def _failed(name: str, why: str) -> Reason:
    remedy = "once it runs, maxattn tune --again"
    return Reason(name, "measured", f"it did not run when maxattn tune measured it: {why}", remedy)


def _notes(times: CallTimes, target: Target) -> tuple[str, ...]:
    data = f"kernels were timed with the mask {times.data}; " if times.data else ""
    kept = (f"{data}the times are from {times.source}",) if times.source else ()
    return (*kept, *_other_versions(times, target))


def _lost(faster: Iterable[str], target: Target) -> tuple[str, ...]:
    """Say what fa4-jax would bring, where it is not there any more and flash was faster."""
    from maxattn.kernels.flash import install

    lost = [name for name in faster if _is_without_fa4(name, target)]
    return (f"flash was measured to be faster: {install(target)}",) if lost else ()


def _other_versions(times: CallTimes, target: Target) -> tuple[str, ...]:
    """Say which versions are others than those that were measured; what was measured still counts:
    it is of this device, which the rule without it need not be.
    """
    then, now = dict(times.versions), dict(target.packages)
    names = [n for n in {**then, **now} if then.get(n) != now.get(n)]
    names = names if target.is_this_machine else [n for n in names if n in then and n in now]
    if not names:
        return ()
    was, is_ = (", ".join(f"{n} {of.get(n, 'missing')}" for n in names) for of in (then, now))
    return (f"kernels were measured with {was}, and this machine has {is_}: {AGAIN}",)
