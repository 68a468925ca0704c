"""The kernels that `auto` tries first: those that `maxattn tune` measured on this kind of device.

Forward and backward are measured and chosen separately. The kernel that `auto` chooses without
measurements is kept, unless another kernel is faster by more than the noise. A kernel that cannot
run, or that failed when it was measured, is refused with its reason.
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
Candidates = tuple[tuple[str, str], ...]
"""(kernel, reason) pairs, in the order in which they are tried."""
Runs = Callable[[str], bool]


class TunedOrder(NamedTuple):
    """The kernels to try, in order; why measured kernels failed; further lines of a plan."""

    candidates: Candidates
    failed: tuple[Reason, ...]
    notes: tuple[str, ...]


def tuned_order(
    local: Call, target: Target, config: AttentionConfig, usual: Iterable[tuple[str, str]]
) -> TunedOrder | None:
    """Order the kernels by the target's measurements; None if it has none for this call.

    Args:
        local: the call that one device computes.
        target: the machine, with its measurements.
        config: `deterministic` excludes kernels; only measurements with equal settings count.
        usual: the kernels that `auto` tries without measurements, each with its reason.
    """
    times = times_for(local, target, config)
    if times is None:
        return None

    def is_refused(name: str) -> bool:
        return refusal(name, local, target, config.deterministic) is not None

    def runs(name: str) -> bool:
        return name in TABLE and not is_refused(name) and not _is_without_fa4(name, target)

    usual, why = tuple(usual), dict(times.failed)
    (first, last), because = own_passes(usual, lambda name: name not in why and runs(name))
    forward = _pick("forward", times.forward, runs, (first,), because)
    backward = _pick("backward", times.backward, runs, (last, forward.name), because)
    faster = tuple(dict.fromkeys((*forward.faster, *backward.faster)))
    refused = [(name, "") for name in faster if is_refused(name)]
    if forward.is_measured or backward.is_measured:
        passes = sorted((forward, backward), key=lambda one: not one.is_measured)
        because = f"{HERE}: {'; '.join(one.said for one in passes if one.said)}"
    gone = {*why, *dict(refused)}
    others = [each for each in usual if not gone & {*each[0].split("/")}]
    plain = [each for each in usual if each[0] in PLAIN]
    names = (*refused, (joined(forward.name, backward.name), because), *others, *plain)
    remedy = "once the kernel runs, run maxattn tune --again"
    rule = "it did not run when maxattn tune measured it"
    failed = tuple(
        Reason(name, "measured", f"{rule}: {text}", remedy)
        for name, text in why.items()
        if name in TABLE
    )
    first_of_each = {name: (name, said) for name, said in reversed(names)}
    ordered = tuple(first_of_each[name] for name in dict.fromkeys(name for name, _ in names))
    return TunedOrder(ordered, failed, _notes(times, target, faster))


def times_for(local: Call, target: Target, config: AttentionConfig) -> CallTimes | None:
    """Return a call's last measurement, preferably with the target's versions of packages."""
    if not target.kernel_times or unmeasured_for(local):
        return None
    key, settings = key_of_kernels(local), settings_of(config)
    same = [t for t in target.kernel_times if (t.call, t.settings) == (key, settings)]
    own = [times for times in same if dict(times.versions) == dict(target.packages)]
    return (own or same or [None])[-1]


def own_passes(usual: Candidates, usable: Runs) -> tuple[tuple[str, str], str]:
    """Return (forward, backward) and the reason of the first candidate whose kernels can run."""
    there = (each for each in usual if all(map(usable, each[0].split("/"))))
    name, because = next(there, ("dot_product", "plain JAX, since nothing else can run"))
    first, *_, last = [*name.split("/")] * 2
    return (first, last), because


def joined(forward: str, backward: str) -> str:
    """Return the name of a pair, "forward/backward", or one name if both kernels are the same."""
    return forward if forward == backward else f"{forward}/{backward}"


def _is_without_fa4(name: str, target: Target) -> bool:
    """Check whether a measured kernel is flash and would run cuDNN, since fa4-jax is missing."""
    from maxattn.kernels.flash import has_fa4

    return name == "flash" and target.platform == "gpu" and not has_fa4(target)


class _Picked(NamedTuple):
    """A pass's kernel, whether it was measured, faster kernels that cannot run, and the reason."""

    name: str
    is_measured: bool
    faster: tuple[str, ...]
    said: str


def _pick(
    what: str, rounds: Rounds, runs: Runs, preferred: tuple[str, ...], because: str
) -> _Picked:
    """Pick the fastest kernel that can run, or a kernel of `preferred` that is as fast."""
    ranked = sorted(dict(rounds).items(), key=lambda each: milliseconds_of(each[1]))
    there = {name: ms for name, ms in ranked if runs(name)}
    if not there:
        name, nothing = preferred[0], f"no kernel measured in the {what} runs; " if rounds else ""
        return _Picked(name, False, (), f"{nothing}{what} {name} by the rules, {because}")
    best = next(iter(there))
    name = next((n for n in preferred if n in there and is_as_fast(there[n], there[best])), best)
    names = [name for name, _ in ranked]
    faster = tuple(name for name in names[: names.index(best)] if name in TABLE)
    times = {name: milliseconds_of(its) for name, its in there.items()}
    said = f"{what} {name} {in_digits(times[name])} ms"
    if following := next((other for other in times if other != name), None):
        said += f", {following} {in_digits(times[following])} ms"
        said += " (no faster than the noise)" if times[following] < times[name] else ""
    return _Picked(name, True, faster, said)


def in_digits(ms: float) -> str:
    """Return milliseconds as text with three digits."""
    decimals = 3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:.{decimals}f}" if ms >= 0.01 else f"{ms:.2g}"


def _notes(times: CallTimes, target: Target, faster: Iterable[str]) -> tuple[str, ...]:
    """Return notes on the times' source, on changed versions, and on a faster fa4-jax."""
    notes = []
    if times.source:
        data = f"kernels were timed with the mask {times.data}; " if times.data else ""
        notes.append(f"{data}the times are from {times.source}")
    # Measurements with other versions still count: rules may not have been measured on this device.
    then, now = dict(times.versions), dict(target.packages)
    names = [n for n in {**then, **now} if then.get(n) != now.get(n)]
    names = names if target.is_this_machine else [n for n in names if n in then and n in now]
    if names:
        was, is_ = (", ".join(f"{n} {of.get(n, 'missing')}" for n in names) for of in (then, now))
        note = f"kernels were measured with {was}, and this machine has {is_}: {AGAIN}"
        notes.append(note)
    if any(_is_without_fa4(name, target) for name in faster):
        from maxattn.kernels.flash import install

        notes.append(f"flash was measured to be faster: {install(target)}")
    return tuple(notes)
