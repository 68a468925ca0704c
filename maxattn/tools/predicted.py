"""How long a plan's forward takes: measured by `maxattn tune`, else estimated."""

from __future__ import annotations

from typing import NamedTuple, cast, get_args

from maxattn.block_sizes.estimated.choose import estimated_sizes, how_estimated
from maxattn.block_sizes.sizes import KernelKind
from maxattn.config import AttentionConfig
from maxattn.kernels import computed_call
from maxattn.kernels.auto.tuned_order import HERE, times_for
from maxattn.plan import Plan
from maxattn.tuned.kernels import milliseconds_of


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
    """Hold the time of one device's call, and where it is from in a few words."""

    ms: Milliseconds
    how: str


def forward_time(plan: Plan, config: AttentionConfig) -> Predicted | None:
    """Return how long the forward of a plan takes; None where nobody knows.

    Args:
        plan: of one device's call: over a mesh transfers and compute overlap, and none is given.
        config: that it was made with; `maxattn tune` measured with the same settings.
    """
    if plan.mesh:
        return None
    kernel, call, target = plan.kernel.for_inference(), plan.padded_call, plan.target
    times = times_for(call, target, config)
    if times and kernel.name in (measured := dict(times.forward)):
        ms = milliseconds_of(measured[kernel.name])
        return Predicted(Milliseconds(ms, ms), HERE)
    if target.platform == "tpu" and kernel.name in get_args(KernelKind):
        its = computed_call(kernel.name, call, "tpu")
        found = estimated_sizes(cast(KernelKind, kernel.name), its, target, False)
        if found is None:
            return None
        return Predicted(Milliseconds(*(1e3 * end for end in found.seconds)), how_estimated())
    estimate = kernel.microseconds(call, target)
    if estimate is None:
        return None
    ms = estimate[0] / 1e3
    return Predicted(
        Milliseconds(ms, ms),
        "estimated, not run; maxattn tune measures it",
    )
