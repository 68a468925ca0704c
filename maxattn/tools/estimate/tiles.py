"""How many tiles of a plan's mask each kernel computes: whole, or with the mask evaluated."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from maxattn.block_sizes import DKV, DQ, FORWARD, BlockSizes
from maxattn.call import Call
from maxattn.decide import kernel_call
from maxattn.kernels import computed_call
from maxattn.kernels.composed.pair import kernels_of
from maxattn.kernels.splash.calls import Setup
from maxattn.kernels.splash.kernel import Splash
from maxattn.kernels.splash.tokamax import PARTIAL, WHOLE, marks_of
from maxattn.masks.terms import SplitMask, split_mask
from maxattn.masks.tile_kinds import tile_kinds
from maxattn.plan import Plan

Phase = Literal["fwd", "dkv", "dq"]
"""The forward; the backward of K and V, of Q too when fused; the separate backward of Q."""
_KEYS: dict[Phase, tuple[str, ...]] = {"fwd": FORWARD, "dkv": DKV, "dq": DQ}
_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}  # of a query tile with a key tile; a fused dkv has 5


class KernelTiles(NamedTuple):
    """Hold what one call of a kernel computes.

    Args:
        block: queries and keys of a tile.
        full, masked: tiles of one head without and with the mask; empty ones are in neither.
        grids: how many steps one head may have: all tiles, or those that are left where a grid ends
            with its longest row, or column, of visited tiles.
        heads: heads times batch.
        flops: operations of its products a visited tile, over the pairs that the mask allows.
        is_bound: which tiles are visited differs by rank; `full` and `masked` mean nothing.
    """

    block: tuple[int, int]
    full: int
    masked: int
    grids: tuple[int, ...]
    heads: int
    flops: float
    is_bound: bool

    @property
    def visited(self) -> int:
        """Tiles of one head that are computed."""
        return self.full + self.masked

    @property
    def skips_nothing(self) -> bool:
        """Whether every tile is computed."""
        return not self.is_bound and self.visited == self.grids[0]


def tiles_of(plan: Plan, training: bool) -> dict[Phase, KernelTiles]:
    """Count the tiles of each kernel that a plan runs; none where its kernel has no tiles."""
    if not all(isinstance(kernel.computes, Splash) for kernel in kernels_of(plan.kernel)):
        return {}
    blocks = (plan.kernel if training else plan.kernel.for_inference()).blocks
    assert blocks is not None, plan.kernel
    phases: list[Phase] = ["fwd", "dkv", "dq"] if training else ["fwd"]
    runs: list[Phase] = [phase for phase in phases if blocks.part(_KEYS[phase]) is not None]
    return {phase: _tiles(plan, blocks, phase) for phase in runs}


def _tiles(plan: Plan, sizes: BlockSizes, phase: Phase) -> KernelTiles:
    local = plan.strategy.kernel_call(kernel_call(plan.padded_call, plan.strategy))
    call = computed_call(plan.kernel.name, local, plan.target.platform)
    part = sizes.part(_KEYS[phase])
    assert part is not None, (sizes, phase)
    block, heads = (part[0], part[1]), call.batch * call.heads
    marks, pairs = _marks(call, block), call.mask.allowed_pairs(call.q_len, call.kv_len)
    full, masked = (int(np.count_nonzero(marks == mark)) for mark in (WHOLE, PARTIAL))
    (rows, columns), visited = marks.shape, marks != 0
    widest, tallest = (int(visited.sum(axis=axis).max()) for axis in (1, 0))
    grids = rows * columns, rows * widest, tallest * columns
    fused = phase == "dkv" and bool(sizes.use_fused_bwd_kernel)
    operations = 2 * call.head_dim * (_PRODUCTS[phase] + fused) * pairs
    a_tile = operations / max(1, full + masked)
    is_bound = call.sharded and not call.mask.is_full
    return KernelTiles(block, full, masked, grids, heads, a_tile, is_bound)


def _marks(call: Call, block: tuple[int, int]) -> np.ndarray:
    parts = split_mask(call.mask)
    assert isinstance(parts, SplitMask), parts  # supports() refused it
    kinds = tile_kinds(parts.positions, *block, call.q_len, call.kv_len, 0, 0)
    rows, columns = kinds.shape
    padded = rows * block[0], columns * block[1]
    shows = padded[1] > call.kv_len and not parts.has_ids
    return marks_of(Setup(kinds, None, None, padded, shows))
