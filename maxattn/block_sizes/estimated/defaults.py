"""The tiles of a call where a config sets none: estimated ones that ship, else the rules' own."""

from __future__ import annotations

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
    """The tiles of one pass.

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
    """Return why the schedules that ship do not price a call; "" where they may."""
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

    def pairs(sizes: BlockSizes) -> int:
        return padded_pairs((sizes.block_q, sizes.block_kv), call)

    if not costs:
        return None
    asked = FlashBlockSizes(use_fused_bwd_kernel=fused)
    default, _ = adjust(asked, call, kernel, target, training)
    known = seconds_of(costs, default, call, kernel, target)
    either = kernel == "flash" and fused is None  # of both backwards, where dQ's parts are small
    backwards = (False, True) if either and training else (kernel != "flash" or bool(fused),)
    every = [
        one
        for each in backwards
        for one in ranked(costs, call, kernel, target, training, each)
        if not either or are_parts_small(call, one.sizes, kernel, target.device_kind)
    ]
    if known is None:  # then tiles that compute hardly more pairs than the rules', forward
        every = [one for one in every if pairs(one.sizes) <= (1 + TIE) * pairs(default)]
    else:
        every.append(Estimate(default, known))
    if not every:
        return None
    best = min(every, key=lambda one: one.seconds.slow)
    if known and best.seconds.slow > (1 - TIE) * known.slow:
        best = Estimate(default, known)
    sizes, backward = best.sizes, None
    if training:
        tile = sizes.block_q, sizes.block_kv, sizes.block_kv_compute
        forward = price(costs, "fwd", tile, call, target, kernel)
        assert forward is not None, sizes  # it is a part of what was priced
        backward = best.seconds.plus(-forward.fast, -forward.slow)
    online = seconds_of(costs, sizes, call, kernel, target, "online")
    return EstimatedSizes(*best, known, online, backward)


def how_estimated() -> str:
    """Name the source of the estimates that ship."""
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
    """Write how long the tiles of both passes take, beside those of the rules; or of one pass."""
    forward, training = (estimated_sizes(kernel, call, target, t, fused) for t in (False, True))
    if forward is None or training is None or training.backward is None:
        return ()

    def beside(chosen: EstimatedSizes, what: str) -> str:
        text = f"{in_ms(chosen.seconds)} in {what}"
        if chosen.default is None:
            return text
        is_own = chosen.seconds == chosen.default
        own = "" if is_own else f"{in_ms(chosen.default)} with "
        return f"{text} ({own}the rules' own sizes)"

    if what == "backward":
        text = f"{in_ms(training.backward)} in the backward"
    elif what == "forward":
        text = beside(forward, "the forward")
    else:
        text = f"{beside(forward, 'inference')}, {beside(training, 'training')}"
    if what != "backward" and hides_by_interval(call):
        whole, masked = tile_shares(call, (forward.sizes.block_q, forward.sizes.block_kv))
        text += f"; of a forward's tiles {whole:.0%} are whole, {masked:.0%} evaluate the mask,"
        text += f" {1 - whole - masked:.0%} skipped"
    return (f"block sizes {how_estimated()}: a device's call takes {text}",)
