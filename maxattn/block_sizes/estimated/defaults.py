"""The tiles of a call where a config sets none: estimated ones that ship, else the rules' own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from maxattn import tuned
from maxattn.block_sizes.adjust import adjust
from maxattn.block_sizes.estimated.choose import (
    TIE,
    Costs,
    Estimate,
    padded_pairs,
    price,
    ranked,
    seconds_of,
)
from maxattn.block_sizes.estimated.grids import hides_by_interval, not_priced, tile_shares
from maxattn.block_sizes.estimated.step_cost import Evaluates, Seconds
from maxattn.block_sizes.estimated.table import known_of, shipped, shipped_costs
from maxattn.block_sizes.hbm import are_parts_small
from maxattn.block_sizes.sizes import BlockSizes, KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target


class EstimatedSizes(NamedTuple):
    """Hold the tiles of one pass.

    Args:
        sizes: what runs.
        seconds: how long a call takes with them.
        default: how long it takes with the sizes of the rules; None where that is not known.
        online: how long it takes where scores need a running maximum; None: as long.
        backward: how long the backward's share of it takes; None: there is none.
    """

    sizes: BlockSizes
    seconds: Seconds
    default: Seconds | None
    online: Seconds | None = None
    backward: Seconds | None = None

    @property
    def longest(self) -> Seconds:
        """How long it takes with the scores that take longest."""
        return self.online or self.seconds


@lru_cache(maxsize=4096)
def estimated_sizes(
    kernel: KernelKind, call: Call, target: Target, training: bool, fused: bool | None = None
) -> EstimatedSizes | None:
    """Return the fastest tiles by the schedules that ship; None where they do not say.

    The backward of JAX's kernel is the fused one where it is faster and the parts of its dQ take
    little of the device's memory.

    Args:
        kernel: its name.
        call: the local call, in the dtype that the kernel computes in.
        target: the machine.
        training: forward and backward; else forward alone.
        fused: the backward of `flash` that was asked for, whatever its parts take; None: either.
    """
    if not_estimated(kernel, call, target):
        return None
    costs = shipped_costs(target.device_kind, kernel, call.head_dim, call.dtype)
    return choose(costs, kernel, call, target, training, fused)


def not_estimated(kernel: KernelKind, call: Call, target: Target) -> str:
    """Say why the schedules that ship do not hold for a call; "" where they may."""
    if target.platform != "tpu":
        return "it runs on no TPU"
    if why := not_priced(call):
        return why
    costs = shipped_costs(target.device_kind, kernel, call.head_dim, call.dtype)
    if not costs:
        known = ", ".join(known_of(target.device_kind, kernel)) or "none"
        what = f"head dim {call.head_dim} in {call.dtype}"
        return f"{kernel} on {target.device_kind} has none of {what} (known: {known})"
    if hides_by_interval(call) and ("fwd", Evaluates.INTERVAL) not in costs:
        return f"{kernel} on {target.device_kind} has none that skip tiles by a mask"
    return ""


def choose(
    costs: Costs,
    kernel: KernelKind,
    call: Call,
    target: Target,
    training: bool,
    fused: bool | None = None,
) -> EstimatedSizes | None:
    """Return the fastest tiles by some costs, or those of the rules where these are as fast."""
    if not costs:
        return None
    asked = FlashBlockSizes(use_fused_bwd_kernel=fused)
    default, _ = adjust(asked, call, kernel, target, training)
    known = seconds_of(costs, default, call, kernel, target)
    found = tuple(_ranked(costs, kernel, call, target, training, fused))
    if known is None:
        found = tuple(one for one in found if _pads_as_little(one.sizes, default, call))
    every = (*found, *([Estimate(default, known)] if known else []))
    if not every:
        return None
    best = min(every, key=lambda one: one.seconds.slow)
    if known and best.seconds.slow > (1 - TIE) * known.slow:
        best = Estimate(default, known)
    online = seconds_of(costs, best.sizes, call, kernel, target, "online")
    found = EstimatedSizes(*best, known, online)
    return _with_backward(found, costs, kernel, call, target) if training else found


def _ranked(
    costs: Costs,
    kernel: KernelKind,
    call: Call,
    target: Target,
    training: bool,
    fused: bool | None,
) -> Iterator[Estimate]:
    """Yield what the rules take: of `flash` with the backward that was asked for, else with either
    where dQ's parts are small.
    """
    is_open = kernel == "flash" and fused is None
    way = kernel != "flash" or bool(fused)
    for each in (False, True) if is_open and training else (way,):
        for one in ranked(costs, call, kernel, target, training, each):
            if not is_open or are_parts_small(call, one.sizes, kernel, target.device_kind):
                yield one


def _with_backward(
    found: EstimatedSizes, costs: Costs, kernel: KernelKind, call: Call, target: Target
) -> EstimatedSizes:
    """Add the backward's share of both passes."""
    sizes = found.sizes
    tile = sizes.block_q, sizes.block_kv, sizes.block_kv_compute
    forward = price(costs, "fwd", tile, call, target, kernel)
    assert forward is not None, sizes  # it is a part of what was priced
    return found._replace(backward=found.seconds.plus(-forward.fast, -forward.slow))


def _pads_as_little(sizes: BlockSizes, default: BlockSizes, call: Call) -> bool:
    """Tell whether tiles compute hardly more pairs than those of the rules, forward."""
    mine, theirs = (padded_pairs((s.block_q, s.block_kv), call) for s in (sizes, default))
    return mine <= (1 + TIE) * theirs


def how_estimated() -> str:
    """Say where the estimates that ship are from."""
    return f"estimated by libtpu {shipped().libtpu}'s schedule, not run"


def in_ms(seconds: Seconds) -> str:
    """Write an interval in milliseconds; a single value where its ends are written alike."""
    low, high = (tuned.in_ms(1e3 * end) for end in seconds)
    return low if low == high else f"{low.removesuffix(' ms')} to {high}"


def estimate_note(
    kernel: KernelKind,
    call: Call,
    target: Target,
    what: Literal["forward", "backward"] | None = None,
    fused: bool | None = None,
) -> tuple[str, ...]:
    """Say how long the tiles of both passes take, beside those of the rules; or of one pass."""
    forward, training = (estimated_sizes(kernel, call, target, t, fused) for t in (False, True))
    if forward is None or training is None or training.backward is None:
        return ()
    tiles = "" if what == "backward" else _tiles_text(call, forward.sizes)
    texts = {
        None: f"{_beside(forward, 'inference')}, {_beside(training, 'training')}",
        "forward": _beside(forward, "the forward"),
        "backward": f"{in_ms(training.backward)} in the backward",
    }
    return (f"block sizes {how_estimated()}: a device's call takes {texts[what]}{tiles}",)


def _tiles_text(call: Call, sizes: BlockSizes) -> str:
    """Say which tiles a mask leaves of a forward; "" where every one is computed."""
    if not hides_by_interval(call):
        return ""
    whole, masked = tile_shares(call, (sizes.block_q, sizes.block_kv))
    skipped = f"{1 - whole - masked:.0%} skipped"
    return (
        f"; of a forward's tiles {whole:.0%} are whole, {masked:.0%} evaluate the mask, {skipped}"
    )


def _beside(chosen: EstimatedSizes, what: str) -> str:
    if chosen.default is None:
        return f"{in_ms(chosen.seconds)} in {what}"
    if chosen.seconds == chosen.default:
        return f"{in_ms(chosen.seconds)} in {what} (the rules' own sizes)"
    return f"{in_ms(chosen.seconds)} in {what} ({in_ms(chosen.default)} with the rules' own sizes)"
