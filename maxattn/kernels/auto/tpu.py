"""Which of the tiled TPU kernels comes first: another than `flash` only where it is surely faster.

Their times are intervals, of schedules and not of runs. Where two intervals overlap they do not say
which kernel is faster. `tpu_flash` has two softmaxes forward: it must be faster with that of small
scores, and not surely slower with the other. Its backward starts from an exact LSE and has one.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from maxattn.block_sizes.estimated.choose import TIE
from maxattn.block_sizes.estimated.defaults import (
    EstimatedSizes,
    estimated_sizes,
    how_estimated,
    in_ms,
    not_estimated,
)
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.hbm import are_parts_small, fused_partials_bytes
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.target import Target

OTHERS: tuple[KernelKind, ...] = ("tpu_flash", "tokamax_flash")
"""What may take the place of `flash`."""


class _Passes(NamedTuple):
    """Hold the estimates of a kernel: of a forward alone, and of both passes."""

    name: KernelKind
    forward: EstimatedSizes
    training: EstimatedSizes

    @property
    def backward(self) -> Seconds:
        """How long its backward takes."""
        assert self.training.backward is not None, self.name
        return self.training.backward

    def leads_forward(self, other: _Passes) -> bool:
        """Tell whether its forward is faster beyond doubt, and not slower where scores are large.

        Queries and keys of most diffusion transformers are normalised, and their scores small.
        """
        mine, theirs = self.forward, other.forward.seconds
        return mine.seconds.is_below(theirs) and not theirs.is_below(mine.longest)

    def __str__(self) -> str:
        usual, online = in_ms(self.forward.seconds), in_ms(self.forward.longest)
        also = "" if usual == online else f" ({online} where scores may be large)"
        return f"{self.name} {usual} forward{also}, {in_ms(self.backward)} backward"


def tiled_kernels(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return the tiled kernels of a TPU to try in order, and what is estimated of them.

    Forward and backward are chosen apart: "a/b" is the forward of a and the backward of b.
    """
    flash = _passes("flash", call, target)
    others = [one for name in OTHERS if (one := _passes(name, call, target))]
    if flash is None or not others:
        why = _why_not(OTHERS[0] if flash else "flash", call, target)
        return ("flash",), f"flash by a rule, since no estimates compare: {why}"
    choices = [_choose(flash, left, call, target) for left in _left_over(others)]
    forward, backward = choices[0]
    ordered = dict.fromkeys((forward, backward, flash, *others))
    every = "; ".join(map(str, ordered))
    names = dict.fromkeys("/".join(dict.fromkeys(one.name for one in both)) for both in choices)
    return tuple(names), f"{_said(flash, others, forward, backward)}: {every} ({how_estimated()})"


def seconds_taken(names: str, call: Call, target: Target, training: bool) -> Seconds | None:
    """Return how long what `auto` takes runs; None where no estimate holds.

    Args:
        names: a kernel, or "a/b".
        call: the local call, in the dtype that the kernels compute in.
        target: a TPU.
        training: forward and backward; else forward alone.
    """
    first, *second = (cast(KernelKind, name) for name in names.split("/"))
    if not (second and training):
        alone = estimated_sizes(first, call, target, training)
        return alone and alone.seconds
    forward = estimated_sizes(first, call, target, False)
    both = estimated_sizes(second[0], call, target, True)
    return forward.seconds.plus(*both.backward) if forward and both and both.backward else None


def _left_over(others: list[_Passes]) -> list[list[_Passes]]:
    """List what is left where kernels cannot run: all, then without each, at last none."""
    without = ([one for one in others if one is not gone] for gone in reversed(others))
    return [others, *without, []]


def _choose(
    flash: _Passes, others: list[_Passes], call: Call, target: Target
) -> tuple[_Passes, _Passes]:
    """Return the kernels of the forward and of the backward."""
    return _fastest_forward(flash, others), _fastest_backward(flash, others, call, target)


def _fastest_forward(flash: _Passes, others: list[_Passes]) -> _Passes:
    """Return the kernel of the forward: `flash` unless another is faster beyond doubt."""
    faster = (one for one in others if one.leads_forward(flash))
    return min(faster, key=lambda one: one.forward.longest.slow, default=flash)


def _fastest_backward(flash: _Passes, others: list[_Passes], call: Call, target: Target) -> _Passes:
    """Return the kernel of the backward: `flash` unless another leads, and fits."""
    leading = (one for one in others if _leads(one, flash, call))
    fit = (one for one in leading if not _is_large(one, call, target))
    return min(fit, key=lambda one: one.backward.slow, default=flash)


def _leads(one: _Passes, flash: _Passes, call: Call) -> bool:
    """Tell whether a backward is surely faster, or a tie that spares the parts of dQ."""
    if one.backward.is_below(flash.backward):
        return True
    parts = (fused_partials_bytes(call, p.training.sizes, p.name) for p in (one, flash))
    is_tie = one.backward.slow <= (1 + TIE) * flash.backward.slow
    return [size > 0 for size in parts] == [False, True] and is_tie


def _said(flash: _Passes, others: list[_Passes], forward: _Passes, backward: _Passes) -> str:
    """Say which kernel runs which pass, and why `flash` keeps those that it does."""
    doubts = _forward_doubts(flash, others), _backward_doubts(flash, others)
    if forward is backward is flash:
        apart = f"forward {doubts[0]}; backward {doubts[1]}"
        return f"flash, since {doubts[0] if doubts[0] == doubts[1] else apart}"
    if backward is flash:
        return f"{forward.name}'s forward is faster; flash backward, since {doubts[1]}"
    is_faster = backward.backward.is_below(flash.backward)
    lead = "is faster" if is_faster else "is as fast, with no parts of dQ"
    if forward is flash:
        return f"{backward.name}'s backward {lead}; flash forward, since {doubts[0]}"
    if not is_faster:
        whose = "its" if forward is backward else f"{backward.name}'s"
        return f"{forward.name} is faster forward, and {whose} backward {lead}"
    if forward is backward:
        return f"{forward.name} is faster"
    return f"{forward.name} is faster forward, {backward.name} backward"


def _forward_doubts(flash: _Passes, others: list[_Passes]) -> str:
    """Say why `flash` keeps the forward."""
    slower: dict[str, bool] = {
        one.name: flash.forward.seconds.is_below(one.forward.seconds) for one in others
    }
    return _doubts(slower)


def _backward_doubts(flash: _Passes, others: list[_Passes]) -> str:
    """Say why `flash` keeps the backward."""
    too_large = [one.name for one in others if one.backward.is_below(flash.backward)]
    slower: dict[str, bool] = {one.name: flash.backward.is_below(one.backward) for one in others}
    rest = {name: sure for name, sure in slower.items() if name not in too_large}
    said = [f"{name}'s dQ in parts takes too much memory" for name in too_large]
    return ", ".join([*said, *([_doubts(rest)] if rest else [])])


def _doubts(slower: dict[str, bool]) -> str:
    return ", ".join(
        f"{name} is {'slower' if sure else 'not surely faster'}" for name, sure in slower.items()
    )


def _passes(kernel: KernelKind, call: Call, target: Target) -> _Passes | None:
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    return _Passes(kernel, forward, training) if forward and training else None


def _why_not(kernel: KernelKind, call: Call, target: Target) -> str:
    """Say why a kernel has no estimate of a call."""
    tiles = f"none of {kernel} is of tiles that cut these queries and keys into two or more"
    return not_estimated(kernel, call, target) or tiles


def _is_large(passes: _Passes, call: Call, target: Target) -> bool:
    """Tell whether the parts of dQ take much of the device's memory."""
    sizes, kind = passes.training.sizes, target.device_kind
    return not are_parts_small(call, sizes, passes.name, kind)
