"""How long a plan's forward takes by what `auto` knows: measured, fitted or priced."""

from __future__ import annotations

from typing import NamedTuple, cast, get_args

from maxattn.block_sizes.estimated.defaults import estimated_sizes, how_estimated
from maxattn.block_sizes.sizes import KernelKind
from maxattn.kernels import computed_call
from maxattn.kernels.auto import gpu
from maxattn.plan import Plan


class Milliseconds(NamedTuple):
    """Hold an interval of milliseconds; its ends are one where a single time is known."""

    fast: float
    slow: float

    def times(self, count: int) -> Milliseconds:
        """Return the time of several such calls, one after the other."""
        return Milliseconds(count * self.fast, count * self.slow)

    def __str__(self) -> str:
        low, high = (f"{ms:.3g}" for ms in self)
        return f"{low} ms" if low == high else f"{low} to {high} ms"


class Predicted(NamedTuple):
    """Hold the time of a call, and where it is from.

    Args:
        ms: of one device's call.
        how: where it is from, in a few words.
    """

    ms: Milliseconds
    how: str


def forward_time(plan: Plan) -> Predicted | None:
    """Return how long the forward of a plan takes; None where nobody knows.

    Args:
        plan: of one device's call: over a mesh transfers and compute overlap, and none is given.
    """
    if plan.mesh:
        return None
    if plan.target.platform == "tpu":
        return _on_tpu(plan)
    found = gpu.forward_ms(plan.kernel.for_inference().name, plan.padded_call, plan.target)
    return found and Predicted(Milliseconds(found.ms, found.ms), found.how)


def _on_tpu(plan: Plan) -> Predicted | None:
    name = plan.kernel.for_inference().name
    if name not in get_args(KernelKind):
        return None
    call = computed_call(name, plan.padded_call, "tpu")
    found = estimated_sizes(cast(KernelKind, name), call, plan.target, False)
    if found is None:
        return None
    fast, slow = (1e3 * end for end in found.seconds)
    return Predicted(Milliseconds(fast, slow), how_estimated())
