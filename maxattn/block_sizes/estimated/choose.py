"""The fastest tiles of a call, by what a step of each kernel costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxattn.block_sizes.adjust import adjust
from maxattn.block_sizes.estimated.grids import evaluates, step_grid
from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, Seconds, StepCost, Tile
from maxattn.block_sizes.hbm import fused_partials_bytes
from maxattn.block_sizes.sizes import DKV, DQ, FORWARD, BlockSizes, KernelKind, round_up
from maxattn.call import Call
from maxattn.target import Target

TIE = 0.03
"""Estimates that differ by less do not tell which tiles are faster."""
Costs = Mapping[tuple[Kind, Evaluates], Mapping[Tile, StepCost]]
"""What a step costs, by kernel and what it evaluates of a mask, and by tile."""
NO_COSTS: Costs = {}


class Estimate(NamedTuple):
    """Sizes, and how long a call takes with them, fast and slow end."""

    sizes: BlockSizes
    seconds: Seconds


def price(
    costs: Costs, kind: Kind, tile: Tile, call: Call, target: Target, kernel: KernelKind
) -> Seconds | None:
    """Price one kernel of a call; None where its schedule is not known."""
    cost = costs.get((kind, evaluates(call, tile)), {}).get(tile)
    grid = step_grid(kind, tile, call, kernel) if cost else None
    return cost.seconds(grid, target.device) if cost and grid else None


def seconds_of(
    costs: Costs,
    sizes: BlockSizes,
    call: Call,
    kernel: KernelKind,
    target: Target,
    forward: Kind = "fwd",
) -> Seconds | None:
    """Price all kernels of a call with given sizes; None where one of them is not known.

    Args:
        costs: of the target's kernels, head dim and dtype.
        sizes: of every kernel.
        call: the local call.
        kernel: its name.
        target: a TPU.
        forward: "fwd", or "online" for scores that need a running maximum.
    """
    total = Seconds(0.0, 0.0)
    for kind, tile in tiles_of(sizes).items():
        one = price(costs, forward if kind == "fwd" else kind, tile, call, target, kernel)
        if one is None:
            return None
        total = total.plus(*one)
    machine, sums = target.device.machine, fused_partials_bytes(call, sizes, kernel)
    # XLA reads the parts of dQ that the fused backward wrote, and adds them up.
    summing = sums / machine.hbm if machine else 0.0
    return total.plus(summing, summing)


def padded_pairs(tile: Tile, call: Call) -> int:
    """Return queries times keys after padding."""
    return round_up(call.q_len, tile[0]) * round_up(call.kv_len, tile[1])


def tiles_of(sizes: BlockSizes) -> dict[Kind, Tile]:
    """Return the tiles of each kernel that runs with these sizes."""
    s, found = sizes, dict[Kind, Tile]()
    found["fwd"] = s.block_q, s.block_kv, s.block_kv_compute
    if s.block_q_dkv and s.block_kv_dkv and s.block_kv_dkv_compute:
        kind: Kind = "fused" if s.use_fused_bwd_kernel else "dkv"
        found[kind] = s.block_q_dkv, s.block_kv_dkv, s.block_kv_dkv_compute
    if s.block_q_dq and s.block_kv_dq:
        found["dq"] = s.block_q_dq, s.block_kv_dq
    return found


def divides(kind: Kind, tile: Tile, forward: Tile) -> bool:
    """Tell whether a backward's tile goes with a forward's."""
    is_one_q = kind != "fused" or tile[0] == forward[0]
    return is_one_q and forward[0] % tile[0] == 0 and forward[1] % tile[1] == 0


def ranked(
    costs: Costs, call: Call, kernel: KernelKind, target: Target, training: bool, fused: bool
) -> tuple[Estimate, ...]:
    """Rank the sizes that the rules take as they are by the slow end, for each forward tile one.

    Args:
        costs: of the target's kernels, head dim and dtype.
        call: the local call.
        kernel: its name.
        target: a TPU.
        training: forward and backward; else forward alone.
        fused: whether the backward is the fused one.
    """

    def known(kind: Kind) -> set[Tile]:
        return {tile for (k, _), tiles in costs.items() if k == kind for tile in tiles}

    def fastest(kind: Kind, forward: Tile) -> Tile | None:
        """Return the fastest tile of a backward kernel that goes with a forward's."""
        tiles = (t for t in known(kind) if kernel == "tpu_flash" or divides(kind, t, forward))
        priced = ((t, price(costs, kind, t, call, target, kernel)) for t in tiles)
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
    for forward in sorted(known("fwd")):
        sizes = sizes_of(forward)
        seconds = seconds_of(costs, sizes, call, kernel, target) if sizes else None
        if sizes is None or seconds is None:
            continue
        if adjust(sizes.asked(), call, kernel, target, training) == (sizes, ()):
            found.append(Estimate(sizes, seconds))
    return tuple(sorted(found, key=lambda one: one.seconds.slow))
