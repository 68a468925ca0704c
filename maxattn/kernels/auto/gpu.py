"""What `auto` tries on an NVIDIA GPU: what `table.json` says is fastest, measured by `maxattn bench
--write-table`.

A call that was measured itself takes its measured times. Another takes those that predict.py gives,
of costs that are fitted on a grid of calls. Where the table has no such costs, or they choose worse
than it on calls left out of the fit, the call takes the entry of the measured shape nearest to it:
of its own kind of mask, then of the nearest head dim, then of the least distance in doublings of T,
S and B x N. Forward and backward are chosen apart. Hopper GPUs without entries, or without costs,
take those of the H200. Other GPUs take what published.py holds of them, and cuDNN elsewhere, which
the plan calls a rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from maxattn.call import Call
from maxattn.devices import device_of
from maxattn.kernels import KERNELS, as_batch_rows, computed_call, refusal, scores_of
from maxattn.kernels.auto import published
from maxattn.kernels.auto.cost_terms import BACKWARD, FEW_SCORES, FORWARD, MOST_TOKENS, PLAIN
from maxattn.kernels.auto.measured import (
    FULL,
    MeasuredShape,
    Times,
    costs_measured_on,
    fastest_first,
    mask_kind,
    measured_on,
    nearest,
    read_costs,
    read_tables,
)
from maxattn.kernels.auto.predict import FittedCosts
from maxattn.kernels.flash import has_fa4, install
from maxattn.target import Target

BIAS_RULE = (
    "a rule, not measured on this GPU: of those that take this bias cuDNN first, then"
    " TransformerEngine, then FlashAttention-4"
)
BY_RULE = ("cudnn", "flash", "cudnn_flash_te")
BIASED = ("cudnn", "cudnn_flash_te", "flash")
USUAL = "NVIDIA H200"

# ---- the order -----------------------------------------------------------------------------------


def order(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return what to try, in order, and why. "a/b" is the forward of a and the backward of b.

    Kernels that were faster than the first that can run come first too, so that the plan says why
    they do not.
    """
    device = _measured_device(target)
    if device is None:
        return _unmeasured(call, target)
    entry = _entry_for(call, target, device)
    forward, backward = (_first_usable(times, call, target) for times in _both_ways(entry))
    if forward is None or backward is None:
        why = f"plain JAX, since no kernel that was measured on an {device} takes this call"
        return (entry.forward[0][0], *PLAIN), why
    names = _in_order(entry, forward, backward, target)
    faster = _faster(entry, forward, backward)
    if entry.costs is not None:
        line = _compared(entry, (forward, backward), call, target)
        where = _costs_measured_there(_costs_device(device), target)
        measured = [name for name, _ in entry.forward]
        known = entry.costs.accuracy(measured, entry.costs.nearest(call))
        return names, f"{line}; {known} measured{where}" + _lost(faster, target)
    is_own = entry is _own_entry(call, read_tables()[device])
    return names, _because(entry, device, target, faster, is_own) + _lost(faster, target)


class ForwardTime(NamedTuple):
    """Hold the milliseconds of a kernel's forward, and where they are from."""

    ms: float
    how: str


def forward_ms(kernel: str, call: Call, target: Target) -> ForwardTime | None:
    """Return how long the forward of a kernel takes.

    Args:
        kernel: its name; "flash" without fa4-jax is cuDNN.
        call: of one device.
        target: a GPU.

    Returns:
        The time that was measured for this very call, else the predicted one; None where the
        kernel, the device or such calls were not measured.
    """
    device = _measured_device(target)
    if device is None:
        return None
    entry = _entry_for(call, target, device)
    name = "cudnn" if kernel == "flash" and not has_fa4(target) else kernel
    ms = dict(entry.forward).get(name)
    if entry.costs is not None:
        on = _costs_measured_there(_costs_device(device), target)
        how = f"predicted, {entry.costs.error:.0%} median error, from times measured{on}"
    elif entry is _own_entry(call, read_tables()[device]):
        how = f"measured{_measured_there(device, target)}"
    else:
        return None
    return None if ms is None else ForwardTime(ms, how)


def _entry_for(call: Call, target: Target, device: str) -> MeasuredShape:
    """Return the times that hold for a call: its own, else predicted, else of the nearest shape."""
    entries, costs = read_tables()[device], read_costs()
    if (own := _own_entry(call, entries)) is not None:
        return own
    mine = costs.get(_costs_device(device))
    if mine is not None and mine.decides and max(call.q_len, call.kv_len) <= MOST_TOKENS:
        predicted = _predicted(call, target, mine)
        if predicted.forward and predicted.backward:
            return predicted
    return _as_launched(nearest(as_batch_rows(call), entries), call, target)


def _costs_device(device: str) -> str:
    """Return the device whose costs hold for one with entries: its own, else the usual one."""
    return device if device in read_costs() else USUAL


def _own_entry(call: Call, entries: tuple[MeasuredShape, ...]) -> MeasuredShape | None:
    """Return the entry of the very call, where it was measured."""
    if call.dtype != "bfloat16" or call.kv_heads != call.heads or call.mask.has_data:
        return None
    if call.value_head_dim:
        return None
    size = call.batch, call.q_len, call.kv_len, call.heads, call.head_dim
    mask = "" if call.mask.is_full else str(call.mask)
    same = (e for e in entries if e.shape == size and e.mask_text == mask)
    return next((e for e in same if mask or e.mask == FULL), None)


def _predicted(call: Call, target: Target, costs: FittedCosts) -> MeasuredShape:
    """Return predicted times, of kernels whose refusal is not the mask's: that would be no time."""
    size = call.batch, call.q_len, call.kv_len, call.heads, call.head_dim
    few = scores_of(call) <= FEW_SCORES
    reasons = {name: refusal(name, call, target) for name in KERNELS if few or name not in PLAIN}
    names = [n for n, why in reasons.items() if why is None or not why.feature.startswith("mask")]
    nearest = costs.nearest(call)
    forward, backward = (
        costs.ranked(costs.predict_all(names, what, call, target.device), what, nearest)
        for what in (FORWARD, BACKWARD)
    )
    return MeasuredShape(size, mask_kind(call), forward, backward, costs=costs)


def fused_with_bias(call: Call, target: Target) -> tuple[str, ...]:
    """Name the fused kernels that take the bias of a call, in the order of the rule."""
    return tuple(name for name in BIASED if refusal(name, call, target) is None)


def _measured_device(target: Target) -> str | None:
    """Return the device whose entries hold for a target."""
    tables = read_tables()
    if target.device.kind in tables:
        return target.device.kind
    return USUAL if USUAL in tables and target.device.is_a("hopper") else None


def is_measured_on(target: Target) -> bool:
    """Tell whether the entries that hold for a target were measured on its kind of device; a name
    of ours, such as "NVIDIA H100", is that of the card that was measured.
    """
    device = _measured_device(target)
    return device is not None and _is_one_of(measured_on()[device], target)


def _is_one_of(kinds: Iterable[str], target: Target) -> bool:
    return any(target.device_kind in (kind, device_of(kind).kind) for kind in kinds)


def _unmeasured(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return what others published to be fastest, or the rule."""
    names = _by_rule(call, target)
    row = published.row_for(call, target)
    if row is None or not all(_usable(name, call, target) for name in row.first.split("/")):
        return names, "a rule, not measured on this GPU: cuDNN first"
    return tuple(dict.fromkeys((row.first, *names))), row.because


def _by_rule(call: Call, target: Target) -> tuple[str, ...]:
    # cuDNN is named even where it cannot run, so that the plan says why.
    others = (name for name in BY_RULE[1:] if refusal(name, call, target) is None)
    return (BY_RULE[0], *others, *PLAIN)


def _both_ways(entry: MeasuredShape) -> tuple[Times, Times]:
    return entry.forward, entry.backward


def _first_usable(times: Times, call: Call, target: Target) -> str | None:
    return next((name for name, _ in times if _usable(name, call, target)), None)


def _in_order(entry: MeasuredShape, forward: str, backward: str, target: Target) -> tuple[str, ...]:
    """Return those that were faster and cannot run, the pair that runs, and the others."""
    first = forward if forward == backward else f"{forward}/{backward}"
    faster = _faster(entry, forward, backward)
    there = [n for n in (*faster, *entry.by_total) if n != "flash" or has_fa4(target)]
    refused = [n for n in there if n in faster and n not in (forward, backward)]
    return tuple(dict.fromkeys((*refused, first, *there, *PLAIN)))


def _faster(entry: MeasuredShape, forward: str, backward: str) -> tuple[str, ...]:
    """Name what was faster than the chosen forward or the chosen backward."""
    ahead = []
    for times, chosen in zip(_both_ways(entry), (forward, backward), strict=True):
        names = [name for name, _ in times]
        ahead += names[: names.index(chosen)]
    return tuple(ahead)


def _compared(entry: MeasuredShape, chosen: tuple[str, str], call: Call, target: Target) -> str:
    """Say the predicted times of what was chosen, and of the next best that can run."""
    parts = []
    for what, times, name in zip((FORWARD, BACKWARD), _both_ways(entry), chosen, strict=True):
        others = (each for each in times if each[0] != name and _usable(each[0], call, target))
        following = next(others, None)
        beside = f", {following[0]} {_ms(following[1])}" if following else ""
        parts.append(f"{what} {name} {_ms(dict(times)[name])} ms{beside}")
    return f"predicted {'; '.join(parts)}"


def _ms(ms: float) -> str:
    return f"{ms:.2g}" if ms < 100 else f"{ms:.0f}"


def _because(
    entry: MeasuredShape, device: str, target: Target, faster: tuple[str, ...], is_own: bool
) -> str:
    first = "the fastest that can run" if faster else "fastest"
    mask = "" if entry.mask == FULL else f" mask {entry.mask_text or entry.mask}"
    near = "as measured" if is_own else "the nearest shape measured"
    return f"{first} at {entry.text}{mask}, {near}{_measured_there(device, target)}"


def _measured_there(device: str, target: Target) -> str:
    """Say where times were measured, and where that is another device."""
    is_own = device == _measured_device(target) and is_measured_on(target)
    on = target.device_kind if is_own else device
    return f" on an {on}" + (
        "" if on == target.device_kind else f", and this is {target.device_kind}"
    )


def _costs_measured_there(device: str, target: Target) -> str:
    """Say on which devices costs were measured, and where that is none of this kind."""
    kinds = costs_measured_on().get(device, {})
    if len(kinds) < 2:
        return _measured_there(device, target)
    on = " and ".join(f"an {name}" for name in dict.fromkeys(device_of(k).kind for k in kinds))
    other = "" if _is_one_of(kinds, target) else f", and this is {target.device_kind}"
    return f" on {on}{other}"


def _lost(faster: tuple[str, ...], target: Target) -> str:
    """Say what fa4-jax would bring, where it is not installed and flash was faster."""
    is_lost = "flash" in faster and not has_fa4(target)
    return f"; flash would be faster: {install(target)}" if is_lost else ""


def _as_launched(entry: MeasuredShape, call: Call, target: Target) -> MeasuredShape:
    """Take the time of flash's backward as this call gets it: with its queries split or not."""
    computed = computed_call("flash", call, "gpu")
    if not entry.unsplit or KERNELS["flash"].splits_backward(computed, target):
        return entry
    times = dict(entry.backward) | {"flash": entry.unsplit}
    return replace(entry, backward=fastest_first(times))


# ---- what can run --------------------------------------------------------------------------------


def _usable(name: str, call: Call, target: Target) -> bool:
    """Tell whether what was measured under a name would run: flash without fa4-jax is cuDNN."""
    return refusal(name, call, target) is None and (name != "flash" or has_fa4(target))
