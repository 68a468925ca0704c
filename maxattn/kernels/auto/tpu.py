"""Which tiled TPU kernel `auto` tries first: `flash`, unless another kernel is surely faster.

Times are intervals, estimated from compiled schedules and not from runs: if two intervals overlap,
neither kernel is surely faster. `tpu_flash` has a fast softmax for small scores and an online one:
its forward must be surely faster with the fast softmax, and not surely slower with the online one.
If there are few keys, `tpu_few_keys` comes first, unless another kernel's estimates are shorter.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from maxattn.block_sizes.estimated.choose import (
    TIE,
    EstimatedSizes,
    estimated_sizes,
    how_estimated,
    in_ms,
    not_estimated,
)
from maxattn.block_sizes.estimated.few_keys import few_keys_seconds
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.few_keys import FEW_KEYS
from maxattn.block_sizes.sizes import KernelKind, are_parts_small, fused_partials_bytes
from maxattn.call import Call
from maxattn.kernels import KERNELS
from maxattn.target import Target

OTHERS: tuple[KernelKind, ...] = ("tpu_flash", "tokamax_flash")
"""Kernels that may replace `flash`."""


class _Passes(NamedTuple):
    """A kernel's estimates: for a forward alone, and for a forward with its backward."""

    name: KernelKind
    forward: EstimatedSizes
    training: EstimatedSizes

    @property
    def backward(self) -> Seconds:
        assert self.training.backward is not None, self.name
        return self.training.backward

    def __str__(self) -> str:
        usual, online = in_ms(self.forward.seconds), in_ms(self.forward.longest)
        also = "" if usual == online else f" ({online} if scores may be large)"
        return f"{self.name} {usual} forward{also}, {in_ms(self.backward)} backward"


def tiled_kernels(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return a TPU's tiled kernels in the order to try, and the estimates as the plan's reason."""
    flash = _passes("flash", call, target)
    others = [one for name in OTHERS if (one := _passes(name, call, target))]
    if KERNELS[FEW_KEYS].supports(call, target) is None:
        return _few_keys_first(call, target, [*others, *([flash] if flash else [])])
    if flash is None or not others:
        kernel = OTHERS[0] if flash else "flash"
        tiles = f"{kernel} has none for tiles that split both queries and keys"
        why = not_estimated(kernel, call, target) or tiles
        return ("flash",), f"flash by a rule, since estimates are missing: {why}"
    # Choose among all kernels, then without one of the others, and last flash alone.
    left = [others, *([one for one in others if one is not gone] for gone in others[::-1]), []]
    choices = [
        (_fastest_forward(flash, each), _fastest_backward(flash, each, call, target))
        for each in left
    ]
    forward, backward = choices[0]
    every = "; ".join(map(str, dict.fromkeys((forward, backward, flash, *others))))
    names = dict.fromkeys("/".join(dict.fromkeys(one.name for one in both)) for both in choices)
    how = how_estimated(target.device_kind)
    return tuple(names), f"{_said(flash, others, forward, backward)}: {every} ({how})"


def _few_keys_first(
    call: Call, target: Target, others: list[_Passes]
) -> tuple[tuple[str, ...], str]:
    """Order the kernels of a call with few keys, by the slow ends of a forward and a backward."""
    few = few_keys_seconds(call, target)
    if few is None:
        why = f"no schedules of it ship for head dim {call.head_dim} in {call.dtype}"
        return (FEW_KEYS, "flash"), f"{FEW_KEYS} by a rule, since the keys are few: {why}"
    every = "; ".join((f"{FEW_KEYS} {few}", *map(str, others)))
    times = {one.name: one.forward.longest.slow + one.backward.slow for one in others}
    faster = [name for name in times if times[name] < few.forward.slow + few.backward.slow]
    names = (*sorted(faster, key=times.__getitem__), FEW_KEYS, "flash")
    lacks = "" if others else "; the others have no estimates with all keys in one tile"
    how = how_estimated(target.device_kind)
    return names, f"{names[0]}, which is fastest: {every}{lacks} ({how})"


def seconds_taken(names: str, call: Call, target: Target, training: bool) -> Seconds | None:
    """Return the estimated time of a kernel, or of a pair "a/b"; None if there is no estimate."""
    first, *second = (cast(KernelKind, name) for name in names.split("/"))
    if not (second and training):
        alone = estimated_sizes(first, call, target, training)
        return alone and alone.seconds
    forward = estimated_sizes(first, call, target, False)
    both = estimated_sizes(second[0], call, target, True)
    return forward.seconds.plus(*both.backward) if forward and both and both.backward else None


def _passes(kernel: KernelKind, call: Call, target: Target) -> _Passes | None:
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    return _Passes(kernel, forward, training) if forward and training else None


def _fastest_forward(flash: _Passes, others: list[_Passes]) -> _Passes:
    """Choose the kernel of the forward: `flash`, unless another kernel is surely faster.

    A kernel that is surely slower than `flash` with large scores is left out. Scores are usually
    small, since most diffusion transformers normalise queries and keys.
    """
    theirs = flash.forward.seconds
    faster = [
        one
        for one in others
        if one.forward.seconds.is_below(theirs) and not theirs.is_below(one.forward.longest)
    ]
    return min(faster, key=lambda one: one.forward.longest.slow, default=flash)


def _fastest_backward(flash: _Passes, others: list[_Passes], call: Call, target: Target) -> _Passes:
    """Choose the kernel of the backward: `flash`, unless another kernel leads and fits.

    A kernel leads if it is surely faster, or as fast without partial dQ arrays; it fits if its
    partial dQ arrays take a small share of the device's memory.
    """

    def leads(one: _Passes) -> bool:
        if one.backward.is_below(flash.backward):
            return True
        mine, theirs = (fused_partials_bytes(call, p.training.sizes, p.name) for p in (one, flash))
        is_tie = one.backward.slow <= (1 + TIE) * flash.backward.slow
        return mine == 0 < theirs and is_tie

    fit = [
        one
        for one in others
        if leads(one) and are_parts_small(call, one.training.sizes, one.name, target.device_kind)
    ]
    return min(fit, key=lambda one: one.backward.slow, default=flash)


def _said(flash: _Passes, others: list[_Passes], forward: _Passes, backward: _Passes) -> str:
    """Return the plan's reason: which kernel runs each pass, and why."""

    def doubts(name: str, is_slower: bool) -> str:
        return f"{name} is {'slower' if is_slower else 'not surely faster'}"

    forwards = [
        doubts(one.name, flash.forward.seconds.is_below(one.forward.seconds)) for one in others
    ]
    backwards = [
        f"{one.name}'s partial dQ takes too much memory"
        if one.backward.is_below(flash.backward)
        else doubts(one.name, flash.backward.is_below(one.backward))
        for one in others
    ]
    is_faster = backward.backward.is_below(flash.backward)
    lead = "faster" if is_faster else "as fast, without partial dQ"
    of_forward = f"since {', '.join(forwards)}" if forward is flash else "which is faster"
    of_backward = f"since {', '.join(backwards)}" if backward is flash else f"which is {lead}"
    if (forward, of_forward) == (backward, of_backward):
        return f"{forward.name}, {of_forward}"
    return f"forward {forward.name}, {of_forward}; backward {backward.name}, {of_backward}"
