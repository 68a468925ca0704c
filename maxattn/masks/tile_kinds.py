"""Classify a mask's tiles as empty, full or mixed, at any offsets, without an array [T, S].

A mask without arrays is classified by its intervals. For a mask with arrays, the device computes
bounds from the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.masks.blocks import EMPTY, FULL, MIXED

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int8

    from maxattn.masks.base import Mask
    from maxattn.masks.terms import Offset

Kinds = Any  # int8 [query tiles, key tiles], numpy or traced


def tile_kinds(
    mask: Mask,
    block_q: int,
    block_kv: int,
    q_len: int,
    kv_len: int,
    q_offset: Offset,
    kv_offset: Offset,
) -> Kinds:
    """Classify the tiles of a mask without arrays; with offsets, an uncertain tile is MIXED."""
    if mask.is_full:  # known at any offset: kernels then need no tile lists in scalar memory
        return np.full((-(-q_len // block_q), -(-kv_len // block_kv)), FULL, np.int8)
    traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
    xp: Any = jnp if traced else np
    if not traced and q_offset == 0 and kv_offset == 0:
        return mask.block_map(block_q, block_kv, q_len, kv_len)
    # A ragged tile repeats the last real query row, which changes no tile's kind.
    rows = np.minimum(np.arange(-(-q_len // block_q) * block_q), q_len - 1).reshape(-1, block_q)
    start = np.arange(0, kv_len, block_kv)
    end = np.minimum(start + block_kv, kv_len)
    q_pos = rows + q_offset
    # [query tiles, rows, 1] against [1, 1, key tiles]: jax may be set to refuse unequal ranks.
    start, end = (start + kv_offset)[None, None, :], (end + kv_offset)[None, None, :]
    some = xp.zeros((rows.shape[0], end.shape[2]), bool)
    for lo, hi in mask.intervals(q_pos, xp):
        hit = (lo[..., None] < end) & (hi[..., None] > start) & (lo < hi)[..., None]
        some = some | hit.any(axis=1)
    full = xp.zeros((rows.shape[0], 1, end.shape[2]), bool)
    for lo, hi in mask.intervals(q_pos, xp, data=False):
        full = full | ((lo[..., None] <= start) & (hi[..., None] >= end))
    return xp.where(full.all(axis=1), FULL, xp.where(some, MIXED, EMPTY)).astype(np.int8)


def kinds_by_arrays(
    mask: Mask, blocks: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Any, Any]
) -> Int8[Array, "B QB KB"]:
    """Classify tiles on the device, from the positions and arrays of a bound mask.

    Args:
        blocks: numbers of queries and keys in a tile; the last tiles may be ragged.
        lengths: numbers of local queries and keys.
        offsets: positions of the first local query and key; ints or traced.

    Returns:
        EMPTY, FULL or MIXED for each tile and batch row; B is 1 if all batch rows are alike.
    """

    def of_positions(part: Mask) -> TileBounds:
        kinds = jnp.asarray(tile_kinds(part, *blocks, *lengths, *offsets))[None]
        return TileBounds(kinds != EMPTY, kinds == FULL)

    some, every = mask.on_tiles(Tiles(blocks, lengths, offsets[1], of_positions))
    kinds = jnp.where(every, FULL, jnp.where(some, MIXED, EMPTY)).astype(jnp.int8)
    shape = (-(-n // block) for n, block in zip(lengths, blocks, strict=True))
    return jnp.broadcast_to(kinds, (kinds.shape[0], *shape))


# ---- bounds by arrays ----------------------------------------------------------------------------


class TileBounds(NamedTuple):
    """Bounds of each tile: arrays [batch or 1, query tiles or 1, key tiles or 1]."""

    some: Bool[Array, "B QB KB"]  # False only if the mask allows no pair of the tile
    every: Bool[Array, "B QB KB"]  # True only if the mask allows every pair of the tile

    def __and__(self, other: TileBounds) -> TileBounds:
        return TileBounds(self.some & other.some, self.every & other.every)

    def __or__(self, other: TileBounds) -> TileBounds:
        return TileBounds(self.some | other.some, self.every | other.every)

    def __invert__(self) -> TileBounds:
        return TileBounds(~self.every, ~self.some)


def unknown() -> TileBounds:
    """Return bounds that hold for any mask: each tile may be empty, full or mixed."""
    one = jnp.ones((1, 1, 1), bool)
    return TileBounds(one, ~one)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a call's pairs."""

    blocks: tuple[int, int]  # numbers of queries and keys in a tile
    lengths: tuple[int, int]  # numbers of local queries and keys; the last tiles may be ragged
    kv_offset: Any  # position of the first local key; an int or traced
    # the function that bounds the tiles of a mask without arrays
    of_positions: Callable[[Mask], TileBounds]

    def cut(self, x: Any, axis: int) -> Array:
        """Cut an array [B, tokens] into tiles of queries (axis 0) or keys (1): [B, tiles, tokens].

        A ragged last tile repeats the last entry, which `Mask.allowed` reads beyond the end too.
        """
        block, length = self.blocks[axis], self.lengths[axis]
        if x.shape[-1] == length and length % block == 0:
            return jnp.asarray(x).reshape(*x.shape[:-1], -1, block)
        at = np.arange(-(-length // block) * block).reshape(-1, block)
        return jnp.take(jnp.asarray(x), np.minimum(at, length - 1), axis=-1, mode="clip")

    def key_ends(self) -> tuple[Array, Array]:
        """Return the start and end [start, end) of each tile's key positions, each [tiles]."""
        start = np.arange(0, self.lengths[1], self.blocks[1], dtype=np.int32)
        end = np.minimum(start + self.blocks[1], self.lengths[1]).astype(np.int32)
        return jnp.asarray(start) + self.kv_offset, jnp.asarray(end) + self.kv_offset


def of_ids(q: Array, kv: Array) -> TileBounds:
    """Bound tiles by ids [B, tiles, tokens]: tiles with disjoint ranges of ids have no pair."""
    q_low, q_high, q_one = (x[:, :, None] for x in _range(q))
    kv_low, kv_high, kv_one = (x[:, None, :] for x in _range(kv))
    meet = (q_low <= kv_high) & (kv_low <= q_high)
    return TileBounds(meet, meet & q_one & kv_one)


def _range(ids: Array) -> tuple[Array, Array, Array]:
    """Return each tile's least and largest id, and whether the tile has one id and no padding."""
    ids = ids.astype(jnp.int32)
    low = jnp.min(jnp.where(ids < 0, np.iinfo(np.int32).max, ids), axis=-1)
    high = jnp.maximum(jnp.max(ids, axis=-1), -1)
    return low, high, jnp.min(ids, axis=-1) == high
