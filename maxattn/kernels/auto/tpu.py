"""Which of the tiled TPU kernels comes first: another than `flash` only where it is surely faster.

Their times are intervals, of schedules and not of runs. Where two intervals overlap they do not say
which kernel is faster. `tpu_flash` has two softmaxes forward: it must be faster with that of small
scores, and not surely slower with the other. Its backward starts from an exact LSE and has one.
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
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.sizes import KernelKind, are_parts_small, fused_partials_bytes
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
        assert self.training.backward is not None, self.name
        return self.training.backward

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
        kernel = OTHERS[0] if flash else "flash"
        tiles = f"none of {kernel} is of tiles that cut these queries and keys into two or more"
        why = not_estimated(kernel, call, target) or tiles
        return ("flash",), f"flash by a rule, since no estimates compare: {why}"
    # What is left where kernels cannot run: all, then without each, at last none.
    left = [others, *([one for one in others if one is not gone] for gone in others[::-1]), []]
    choices = [
        (_fastest_forward(flash, each), _fastest_backward(flash, each, call, target))
        for each in left
    ]
    forward, backward = choices[0]
    every = "; ".join(map(str, dict.fromkeys((forward, backward, flash, *others))))
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


def _passes(kernel: KernelKind, call: Call, target: Target) -> _Passes | None:
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    return _Passes(kernel, forward, training) if forward and training else None


def _fastest_forward(flash: _Passes, others: list[_Passes]) -> _Passes:
    """Return the kernel of the forward: `flash` unless another is faster beyond doubt.

    It must not be surely slower where scores are large. Queries and keys of most diffusion
    transformers are normalised, and their scores small.
    """
    theirs = flash.forward.seconds
    faster = [
        one
        for one in others
        if one.forward.seconds.is_below(theirs) and not theirs.is_below(one.forward.longest)
    ]
    return min(faster, key=lambda one: one.forward.longest.slow, default=flash)


def _fastest_backward(flash: _Passes, others: list[_Passes], call: Call, target: Target) -> _Passes:
    """Return the kernel of the backward: `flash` unless another is surely faster, or as fast and
    without parts of dQ. Its own parts must not take much of the device's memory.
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
    """Say which kernel runs which pass, and why `flash` keeps those that it does."""

    def doubts(slower: dict[str, bool]) -> str:
        return ", ".join(
            f"{name} is {'slower' if sure else 'not surely faster'}"
            for name, sure in slower.items()
        )

    forwards: dict[str, bool] = {
        one.name: flash.forward.seconds.is_below(one.forward.seconds) for one in others
    }
    too_large = [one.name for one in others if one.backward.is_below(flash.backward)]
    backwards: dict[str, bool] = {
        one.name: flash.backward.is_below(one.backward)
        for one in others
        if one.name not in too_large
    }
    of_forward = doubts(forwards)
    parts = [f"{name}'s dQ in parts takes too much memory" for name in too_large]
    of_backward = ", ".join([*parts, *([doubts(backwards)] if backwards else [])])
    if forward is backward is flash:
        apart = f"forward {of_forward}; backward {of_backward}"
        return f"flash, since {of_forward if of_forward == of_backward else apart}"
    if backward is flash:
        return f"{forward.name}'s forward is faster; flash backward, since {of_backward}"
    is_faster = backward.backward.is_below(flash.backward)
    lead = "is faster" if is_faster else "is as fast, with no parts of dQ"
    if forward is flash:
        return f"{backward.name}'s backward {lead}; flash forward, since {of_forward}"
    if not is_faster:
        whose = "its" if forward is backward else f"{backward.name}'s"
        return f"{forward.name} is faster forward, and {whose} backward {lead}"
    if forward is backward:
        return f"{forward.name} is faster"
    return f"{forward.name} is faster forward, {backward.name} backward"
