"""Which of the tiled TPU kernels comes first: another than `flash` only where it is surely faster.

Their times are intervals, of schedules and not of runs. Where two intervals overlap they do not say
which kernel is faster.
"""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes import fused_partials_bytes
from maxattn.block_sizes.estimated.defaults import (
    EstimatedSizes,
    estimated_sizes,
    how_estimated,
    in_ms,
)
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.devices import memory_of
from maxattn.target import Target

MOST_PARTS = 0.1
"""The share of HBM that the parts of dQ of a kernel may take which nobody named."""


class _Passes(NamedTuple):
    """Hold the estimates of a kernel: forward, and forward and backward."""

    forward: EstimatedSizes
    training: EstimatedSizes

    def is_below(self, other: _Passes) -> bool:
        """Tell whether both passes are faster beyond doubt."""
        pairs = zip(self, other, strict=True)
        return all(mine.seconds.is_below(theirs.seconds) for mine, theirs in pairs)

    def __str__(self) -> str:
        times = (in_ms(self.forward.seconds), in_ms(self.training.seconds))
        return "{} in inference, {} in training".format(*times)


def tiled_kernels(call: Call, target: Target) -> tuple[tuple[str, ...], str]:
    """Return the tiled kernels of a TPU to try in order, and what is estimated of them, or ""."""
    flash, tokamax = (_passes(name, call, target) for name in ("flash", "tokamax_flash"))
    if flash is None or tokamax is None:
        return ("flash",), ""
    both = f"flash {flash}, tokamax_flash {tokamax} ({how_estimated()})"
    if not tokamax.is_below(flash):
        slower = "is slower" if flash.is_below(tokamax) else "is not surely faster"
        return ("flash",), f"tokamax_flash {slower}: {both}"
    if _parts(tokamax, call) > MOST_PARTS * (memory_of(target.device_kind) or float("inf")):
        return ("flash",), f"tokamax_flash's dQ in parts takes too much memory: {both}"
    return ("tokamax_flash", "flash"), f"tokamax_flash is faster: {both}"


def _passes(kernel: KernelKind, call: Call, target: Target) -> _Passes | None:
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    return _Passes(forward, training) if forward and training else None


def _parts(passes: _Passes, call: Call) -> int:
    return fused_partials_bytes(call, passes.training.sizes, "tokamax_flash")
