"""Which tiles of a mask are empty, full or mixed, at any offsets; no T x S array is made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int8

from maxattn.masks.base import Mask
from maxattn.masks.blocks import EMPTY, FULL, MIXED
from maxattn.masks.terms import Offset
from maxattn.masks.tiles import TileBounds, Tiles

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
    """Classify the tiles of a mask of positions: numpy where the offsets are ints, else traced.

    With offsets, a tile is MIXED in doubt.
    """
    if mask.is_full:  # wherever the tokens are: no lists, whose length scalar memory bounds
        return np.full((-(-q_len // block_q), -(-kv_len // block_kv)), FULL, np.int8)
    traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
    xp: Any = jnp if traced else np
    if not traced and q_offset == 0 and kv_offset == 0:
        return mask.block_map(block_q, block_kv, q_len, kv_len)
    # Rows and columns past the ends of a ragged tile repeat the last real one: no answer changes.
    rows = np.minimum(np.arange(-(-q_len // block_q) * block_q), q_len - 1).reshape(-1, block_q)
    start = np.arange(0, kv_len, block_kv)
    end = np.minimum(start + block_kv, kv_len)
    q_pos = rows + q_offset
    # [query tiles, rows, 1] against [1, 1, key tiles]: three axes, since some users forbid that
    # ranks are promoted.
    start, end = (start + kv_offset)[None, None, :], (end + kv_offset)[None, None, :]
    some = xp.zeros((rows.shape[0], end.shape[2]), bool)
    for lo, hi in mask.intervals(q_pos, xp):
        hit = (lo[..., None] < end) & (hi[..., None] > start) & (lo < hi)[..., None]
        some = some | hit.any(axis=1)
    full = xp.zeros((rows.shape[0], 1, end.shape[2]), bool)
    for lo, hi in mask.intervals_lower(q_pos, xp):
        full = full | ((lo[..., None] <= start) & (hi[..., None] >= end))
    return xp.where(full.all(axis=1), FULL, xp.where(some, MIXED, EMPTY)).astype(np.int8)


def kinds_by_arrays(
    mask: Mask, blocks: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Any, Any]
) -> Int8[Array, "B QB KB"]:
    """Classify tiles by the arrays of a mask too, on the device.

    Args:
        mask: bound.
        blocks: queries and keys of a tile; the last ones may be ragged.
        lengths: local queries and keys.
        offsets: positions of the first local query and key; ints or traced.

    Returns:
        EMPTY, FULL or MIXED for each batch row; the batch is 1 where all rows are alike.
    """

    def of_positions(part: Mask) -> TileBounds:
        kinds = jnp.asarray(tile_kinds(part, *blocks, *lengths, *offsets))[None]
        return TileBounds(kinds != EMPTY, kinds == FULL)

    some, every = mask.on_tiles(Tiles(blocks, lengths, offsets[1], of_positions))
    kinds = jnp.where(every, FULL, jnp.where(some, MIXED, EMPTY)).astype(jnp.int8)
    shape = (-(-n // block) for n, block in zip(lengths, blocks, strict=True))
    return jnp.broadcast_to(kinds, (kinds.shape[0], *shape))
