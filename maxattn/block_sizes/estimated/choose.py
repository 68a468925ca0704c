"""Chooses a call's fastest tiles and estimates its time, from the shipped schedules."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from maxattn import tuned
from maxattn.block_sizes._adjust import adjust
from maxattn.block_sizes.estimated.grids import (
    evaluates,
    hides_by_interval,
    not_priced,
    step_grid,
    tile_shares,
)
from maxattn.block_sizes.estimated.measured import beside_measured
from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, Kind, Seconds, Tile
from maxattn.block_sizes.estimated.table import shipped, shipped_costs
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FORWARD,
    BlockSizes,
    KernelKind,
    are_parts_small,
    fused_partials_bytes,
    round_up,
)
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

TIE = 0.03
"""If two estimates differ by less than this share, neither is counted as faster."""


class EstimatedSizes(NamedTuple):
    """The fastest tiles of a forward, or of a forward with its backward."""

    sizes: BlockSizes
    seconds: Seconds  # the time of a call with `sizes`
    default: Seconds | None  # the call's time with the sizes of the rules; None if unknown
    # the call's time if scores need a running maximum; None if it equals `seconds`
    online: Seconds | None = None
    backward: Seconds | None = None  # the backward's part of `seconds`; None without a backward

    @property
    def longest(self) -> Seconds:
        """The time with large scores, which take longest."""
        return self.online or self.seconds


@lru_cache(maxsize=4096)
def estimated_sizes(
    kernel: KernelKind, call: Call, target: Target, training: bool, fused: bool | None = None
) -> EstimatedSizes | None:
    """Return the fastest tiles by the shipped schedules; None if no schedule can time the call.

    The backward of JAX's kernel is the fused backward if that is faster and its partial dQ take
    little of the device's memory.

    Args:
        kernel, target: the kernel's name, and the machine.
        call: the local call, in the dtype that the kernel computes in.
        training: whether to time forward and backward; else the forward alone.
        fused: the user's `use_fused_bwd_kernel`, whatever memory it needs; None: try both.
    """
    if not_estimated(kernel, call, target):
        return None
    costs = shipped_costs(target.device_kind, kernel, call.head_dim, call.dtype)
    return choose(costs, kernel, call, target, training, fused)


def not_estimated(kernel: KernelKind, call: Call, target: Target) -> str:
    """Return why the shipped schedules cannot time a call; "" if they may."""
    if target.platform != "tpu":
        return "it runs on no TPU"
    if why := not_priced(call):
        return why
    costs = shipped_costs(target.device_kind, kernel, call.head_dim, call.dtype)
    if not costs:
        start = f"{target.device_kind}, {kernel}, "
        names = (name for name in shipped().groups if name.startswith(start))
        known = ", ".join(name.removeprefix(start) for name in names) or "none"
        what = f"head dim {call.head_dim} in {call.dtype}"
        return f"{kernel} on {target.device_kind} has none for {what} (known: {known})"
    if hides_by_interval(call) and ("fwd", Evaluates.INTERVAL) not in costs:
        return f"{kernel} on {target.device_kind} has none for masks that leave tiles empty"
    return ""


def choose(
    costs: Costs,
    kernel: KernelKind,
    call: Call,
    target: Target,
    training: bool,
    fused: bool | None = None,
) -> EstimatedSizes | None:
    """Return the fastest tiles by `costs`, or the rules' tiles if these are as fast."""
    if not costs:
        return None
    asked = FlashBlockSizes(use_fused_bwd_kernel=fused)
    default, _ = adjust(asked, call, kernel, target, training)
    known = seconds_of(costs, default, call, kernel, target)
    either = kernel == "flash" and fused is None  # choose among both backwards
    backwards = (False, True) if either and training else (kernel != "flash" or bool(fused),)
    every = [
        one
        for each in backwards
        for one in ranked(costs, call, kernel, target, training, each)
        if not either or are_parts_small(call, one.sizes, kernel, target.device_kind)
    ]
    if known is None:  # only tiles whose forward computes hardly more pairs than the rules' tiles
        most = (1 + TIE) * padded_pairs(tiles_of(default)["fwd"], call)
        every = [one for one in every if padded_pairs(tiles_of(one.sizes)["fwd"], call) <= most]
    else:
        every.append(Estimate(default, known))
    if not every:
        return None
    best = min(every, key=lambda one: one.seconds.slow)
    if known and best.seconds.slow > (1 - TIE) * known.slow:
        best = Estimate(default, known)
    backward = None
    if training:
        forward = price(costs, "fwd", tiles_of(best.sizes)["fwd"], call, target, kernel)
        assert forward is not None, best.sizes  # `best` was timed with its forward
        backward = best.seconds.plus(-forward.fast, -forward.slow)
    online = seconds_of(costs, best.sizes, call, kernel, target, "online")
    return EstimatedSizes(*best, known, online, backward)


# ---- times of sizes ------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """Sizes, and the fast and slow bound of a call's time with them."""

    sizes: BlockSizes
    seconds: Seconds


def ranked(
    costs: Costs, call: Call, kernel: KernelKind, target: Target, training: bool, fused: bool
) -> tuple[Estimate, ...]:
    """Rank legal sizes by the slow end of their times, with one entry per forward tile."""

    def fastest(kind: Kind, forward: Tile) -> Tile | None:
        """Return the fastest tile of a backward kernel that is legal beside a forward's tile."""
        fitting = (
            t
            for t in known_tiles(costs, kind)
            if kernel == "tpu_flash" or divides(kind, t, forward)
        )
        priced = ((t, price(costs, kind, t, call, target, kernel)) for t in fitting)
        found = {tile: seconds.slow for tile, seconds in priced if seconds is not None}
        return min(found, key=lambda tile: found[tile], default=None)

    def sizes_of(forward: Tile) -> BlockSizes | None:
        given: dict[str, Any] = dict(zip(FORWARD, forward, strict=True))
        if not training:
            return BlockSizes(**given)
        dkv = fastest("fused" if fused else "dkv", forward)
        dq = None if fused else fastest("dq", forward)
        if dkv is None or (dq is None and not fused):
            return None
        given |= zip((*DKV, *DQ), (*dkv, *(dq or (None, None))), strict=True)
        return BlockSizes(**given, use_fused_bwd_kernel=fused)

    found: list[Estimate] = []
    for forward in sorted(known_tiles(costs, "fwd")):
        sizes = sizes_of(forward)
        seconds = seconds_of(costs, sizes, call, kernel, target) if sizes else None
        if sizes is None or seconds is None:
            continue
        if adjust(sizes.asked(), call, kernel, target, training) == (sizes, ()):
            found.append(Estimate(sizes, seconds))
    return tuple(sorted(found, key=lambda one: one.seconds.slow))


def seconds_of(
    costs: Costs,
    sizes: BlockSizes,
    call: Call,
    kernel: KernelKind,
    target: Target,
    forward: Kind = "fwd",
) -> Seconds | None:
    """Estimate the time of all kernels of a call with given sizes; None if one time is unknown.

    `forward` is "online" for scores that need a running maximum.
    """
    total = Seconds(0.0, 0.0)
    for kind, tile in tiles_of(sizes).items():
        one = price(costs, forward if kind == "fwd" else kind, tile, call, target, kernel)
        if one is None:
            return None
        total = total.plus(*one)
    machine, sums = target.device.machine, fused_partials_bytes(call, sizes, kernel)
    # XLA reads the partial dQ that the fused backward wrote, and adds them up.
    summing = sums / machine.hbm if machine else 0.0
    return total.plus(summing, summing)


def known_tiles(costs: Costs, kind: Kind) -> set[Tile]:
    """Return the tiles of one kind of kernel whose step costs are known."""
    return {tile for (k, _), tiles in costs.items() if k == kind for tile in tiles}


def price(
    costs: Costs, kind: Kind, tile: Tile, call: Call, target: Target, kernel: KernelKind
) -> Seconds | None:
    """Estimate the time of one kernel of a call; None if its schedule is unknown."""
    cost = costs.get((kind, evaluates(call, tile)), {}).get(tile)
    grid = step_grid(kind, tile, call, kernel) if cost else None
    return cost.seconds(grid, target.device) if cost and grid else None


def padded_pairs(tile: Tile, call: Call) -> int:
    """Return the number of pairs of queries and keys after padding to whole tiles."""
    return round_up(call.q_len, tile[0]) * round_up(call.kv_len, tile[1])


def tiles_of(sizes: BlockSizes) -> dict[Kind, Tile]:
    """Return the tiles of each kernel that runs with these sizes."""
    backward: Kind = "fused" if sizes.use_fused_bwd_kernel else "dkv"
    kinds: tuple[tuple[Kind, tuple[str, ...]], ...] = (
        ("fwd", FORWARD),
        (backward, DKV),
        ("dq", DQ),
    )
    return {kind: tile for kind, keys in kinds if (tile := sizes.part(keys)) is not None}


def divides(kind: Kind, tile: Tile, forward: Tile) -> bool:
    """Check whether a backward's tile is legal beside a forward's tile."""
    is_one_q = kind != "fused" or tile[0] == forward[0]
    return is_one_q and forward[0] % tile[0] == 0 and forward[1] % tile[1] == 0


# ---- in words ------------------------------------------------------------------------------------


def how_estimated(device_kind: str) -> str:
    """Return the source of a device's shipped estimates, and how far off these are, as text."""
    return f"{_source()}; {beside_measured(device_kind)}"


def _source() -> str:
    return f"estimated by libtpu {shipped().libtpu}'s schedule, not run"


def in_ms(seconds: Seconds) -> str:
    """Return an interval in milliseconds as text; one value if both ends have equal digits."""
    low, high = (tuned.in_ms(1e3 * end) for end in seconds)
    return low if low == high else f"{low.removesuffix(' ms')} to {high}"


def estimate_note(
    kernel: KernelKind,
    call: Call,
    target: Target,
    what: Literal["forward", "backward"] | None = None,
    fused: bool | None = None,
) -> tuple[str, ...]:
    """Return a note with the estimated times, and the times with the rules' own sizes."""
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
        text += f"; forward tiles: {whole:.0%} without a mask test, {masked:.0%} with one,"
        text += f" {1 - whole - masked:.0%} skipped"
    text += f"; {beside_measured(target.device_kind)}"
    return (f"block sizes {_source()}: a device's call takes {text}",)
