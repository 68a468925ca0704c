"""The tiles of a call where a config sets none: estimated ones that ship, else the rules' own."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from maxattn import tuned
from maxattn.block_sizes.estimated.choose import (
    TIE,
    Costs,
    Estimate,
    can_price,
    ranked,
    seconds_of,
)
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.estimated.table import shipped, shipped_costs
from maxattn.block_sizes.for_kernel import sizes_for
from maxattn.block_sizes.sizes import BlockSizes, KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target


class EstimatedSizes(NamedTuple):
    """Hold the tiles of one pass.

    Args:
        sizes: what runs.
        seconds: how long a call takes with them.
        default: how long it takes with the sizes of the rules.
    """

    sizes: BlockSizes
    seconds: Seconds
    default: Seconds


@lru_cache(maxsize=4096)
def estimated_sizes(
    kernel: KernelKind, call: Call, target: Target, training: bool
) -> EstimatedSizes | None:
    """Return the fastest tiles by the schedules that ship; None where they do not say.

    Their backward is the separate one of JAX's kernel, whose dQ needs no parts in HBM.

    Args:
        kernel: its name.
        call: the local call, in the dtype that the kernel computes in.
        target: the machine.
        training: forward and backward; else forward alone.
    """
    if target.platform != "tpu" or not can_price(call):
        return None
    costs = shipped_costs(target.device_kind, kernel, call.head_dim, call.dtype)
    return choose(costs, kernel, call, target, training)


def choose(
    costs: Costs, kernel: KernelKind, call: Call, target: Target, training: bool
) -> EstimatedSizes | None:
    """Return the fastest tiles by some costs, or those of the rules where these are as fast."""
    default, _ = sizes_for(FlashBlockSizes(), call, kernel, target, training)
    known = seconds_of(costs, default, call, kernel, target) if costs else None
    if known is None:
        return None
    found = ranked(costs, call, kernel, target, training, kernel != "flash")
    best = min((Estimate(default, known), *found), key=lambda one: one.seconds.slow)
    if best.seconds.slow > (1 - TIE) * known.slow:
        best = Estimate(default, known)
    return EstimatedSizes(*best, known)


def how_estimated() -> str:
    """Say where the estimates that ship are from."""
    return f"estimated by libtpu {shipped().libtpu}'s schedule, not run"


def in_ms(seconds: Seconds) -> str:
    """Write an interval in milliseconds; a single value where its ends are written alike."""
    low, high = (tuned.in_ms(1e3 * end) for end in seconds)
    return low if low == high else f"{low.removesuffix(' ms')} to {high}"


def estimate_note(kernel: KernelKind, call: Call, target: Target) -> tuple[str, ...]:
    """Say how long the tiles of both passes take, beside those of the rules."""
    forward, training = (estimated_sizes(kernel, call, target, t) for t in (False, True))
    if forward is None or training is None:
        return ()
    texts = f"{_beside(forward, 'inference')}, {_beside(training, 'training')}"
    return (f"block sizes {how_estimated()}: a device's call takes {texts}",)


def _beside(chosen: EstimatedSizes, what: str) -> str:
    if chosen.seconds == chosen.default:
        return f"{in_ms(chosen.seconds)} in {what} (the rules' own sizes)"
    return f"{in_ms(chosen.seconds)} in {what} ({in_ms(chosen.default)} with the rules' own sizes)"
