"""Which of the tiled TPU kernels comes first: another than `flash` only where it is surely faster.

Their times are intervals, of schedules and not of runs. Where two intervals overlap they do not say
which kernel is faster. `tpu_flash` has two softmaxes: it must be faster with that of small scores,
and not surely slower with the other.
"""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes import fused_partials_bytes
from maxattn.block_sizes.estimated.defaults import (
    EstimatedSizes,
    estimated_sizes,
    how_estimated,
    in_ms,
    not_estimated,
)
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.devices import memory_of
from maxattn.target import Target

OTHERS: tuple[KernelKind, ...] = ("tpu_flash", "tokamax_flash")
"""What may take the place of `flash`."""
MOST_PARTS = 0.1
"""The share of HBM that the parts of dQ of a kernel may take which nobody named."""


class _Passes(NamedTuple):
    """Hold the estimates of a kernel: forward, and forward and backward."""

    name: KernelKind
    forward: EstimatedSizes
    training: EstimatedSizes

    def is_below(self, other: _Passes) -> bool:
        """Tell whether both passes are faster beyond doubt, and not slower where scores are large.

        Queries and keys of most diffusion transformers are normalised, and their scores small.
        """
        pairs = (self.forward, other.forward), (self.training, other.training)
        faster = all(mine.seconds.is_below(theirs.seconds) for mine, theirs in pairs)
        return faster and not any(theirs.seconds.is_below(mine.longest) for mine, theirs in pairs)

    def __str__(self) -> str:
        times = f"{_time(self.forward)} in inference, {_time(self.training)} in training"
        return f"{self.name} {times}"


def _time(chosen: EstimatedSizes) -> str:
    """Write an interval, and the one of scores that need a running maximum where it is another."""
    usual, online = in_ms(chosen.seconds), in_ms(chosen.longest)
    return usual if usual == online else f"{usual} ({online} where scores may be large)"


def tiled_kernels(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return the tiled kernels of a TPU to try in order, and what is estimated of them."""
    flash = _passes("flash", call, target)
    others = [one for name in OTHERS if (one := _passes(name, call, target))]
    if flash is None or not others:
        why = _why_not(OTHERS[0] if flash else "flash", call, target)
        return ("flash",), f"flash by a rule, since no estimates compare: {why}"
    below = (one for one in others if one.is_below(flash))
    faster = sorted(below, key=lambda one: one.training.longest.slow)
    fit = [one.name for one in faster if not _is_large(one, call, target)]
    first = f"{fit[0]} is faster" if fit else f"flash, since {_doubts(flash, others, faster)}"
    runs = fit[0] if fit else "flash"
    ordered = sorted((*others, flash), key=lambda one: one.name != runs)
    every = "; ".join(map(str, ordered))
    return (*fit, "flash"), f"{first}: {every} ({how_estimated()})"


def _doubts(flash: _Passes, others: list[_Passes], faster: list[_Passes]) -> str:
    """Say why `flash` keeps its place before the others."""
    said = []
    for one in others:
        if one in faster:
            said.append(f"{one.name}'s dQ in parts takes too much memory")
        elif flash.is_below(one):
            said.append(f"{one.name} is slower")
        else:
            said.append(f"{one.name} is not surely faster")
    return ", ".join(said)


def _passes(kernel: KernelKind, call: Call, target: Target) -> _Passes | None:
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    return _Passes(kernel, forward, training) if forward and training else None


def _why_not(kernel: KernelKind, call: Call, target: Target) -> str:
    """Say why a kernel has no estimate of a call."""
    tiles = f"none of {kernel} is of tiles that cut these queries and keys into two or more"
    return not_estimated(kernel, call, target) or tiles


def _is_large(passes: _Passes, call: Call, target: Target) -> bool:
    """Tell whether the parts of dQ take much of the device's memory."""
    parts = fused_partials_bytes(call, passes.training.sizes, passes.name)
    return parts > MOST_PARTS * (memory_of(target.device_kind) or float("inf"))
