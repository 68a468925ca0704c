"""Which key chunks each query chunk must visit: the lists that let a blockwise kernel skip what is
empty.

From a mask's intervals alone, so no T x S array is made. With numpy offsets the lists are
constants; with traced offsets (a shard's position inside `shard_map`) the same arithmetic runs on
the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.masks import EMPTY, FULL, MIXED, Mask


class Visits(NamedTuple):
    """For query chunk i, visit key chunks `index[i, :count[i]]`; test the mask where `mixed` is
    True.

    index: [query chunks, most visits] int32.   mixed: the same shape, bool.   count: [query chunks]
        int32.
    """

    index: Any
    mixed: Any
    count: Any

    @property
    def static(self) -> bool:
        """Whether the lists are numpy constants, known when tracing."""
        return isinstance(self.count, np.ndarray)


def visits(
    mask: Mask,
    block_q: int,
    block_kv: int,
    q_len: int,
    kv_len: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
) -> Visits:
    """List the chunks to visit for local lengths at the given positions.

    Args:
        mask: a bound mask.
        block_q, block_kv: chunk lengths; the last chunk may be ragged.
        q_len, kv_len: local lengths.
        q_offset, kv_offset: position of the first local query and key; ints or traced.
    """
    if mask.is_full:  # wherever the tokens are
        q_offset = kv_offset = 0
    traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
    xp: Any = jnp if traced else np
    kinds = chunk_kinds(mask, block_q, block_kv, q_len, kv_len, q_offset, kv_offset, xp)
    visited = kinds != EMPTY
    count = visited.sum(axis=1).astype(np.int32)
    order = xp.argsort(~visited, axis=1, stable=True).astype(np.int32)
    most = order.shape[1] if traced else max(1, int(count.max()))
    index = order[:, :most]
    return Visits(index, xp.take_along_axis(kinds == MIXED, index, axis=1), count)


def chunk_kinds(
    mask: Mask,
    block_q: int,
    block_kv: int,
    q_len: int,
    kv_len: int,
    q_offset: Any,
    kv_offset: Any,
    xp: Any,
) -> Any:
    """Classify each (query chunk, key chunk) as EMPTY, FULL or MIXED; in doubt MIXED.

    Rows and columns past the ends of a ragged chunk repeat the last real one, so they change no
    answer.
    """
    rows = np.minimum(np.arange(-(-q_len // block_q) * block_q), q_len - 1).reshape(-1, block_q)
    start = np.arange(0, kv_len, block_kv)
    end = np.minimum(start + block_kv, kv_len)
    q_pos = rows + q_offset
    # Three axes for what is compared with [query chunks, rows, 1]: some users forbid that ranks are
    # promoted.
    span = (start + kv_offset)[None, None, :], (end + kv_offset)[None, None, :]
    tiles = (rows.shape[0], start.shape[0])
    some = _any_overlap(mask.intervals(q_pos, xp), *span, tiles, xp)
    full = _all_inside(mask.intervals_lower(q_pos, xp), *span, tiles, xp)
    return xp.where(full, FULL, xp.where(some, MIXED, EMPTY)).astype(np.int8)


def _any_overlap(intervals: Any, start: Any, end: Any, tiles: tuple[int, int], xp: Any) -> Any:
    found = xp.zeros(tiles, bool)
    for lo, hi in intervals:
        # [query chunks, rows, 1] against [1, 1, key chunks]
        hit = (lo[..., None] < end) & (hi[..., None] > start) & (lo < hi)[..., None]
        found = found | hit.any(axis=1)
    return found


def _all_inside(intervals: Any, start: Any, end: Any, tiles: tuple[int, int], xp: Any) -> Any:
    inside = xp.zeros((tiles[0], 1, tiles[1]), bool)
    for lo, hi in intervals:
        inside = inside | ((lo[..., None] <= start) & (hi[..., None] >= end))
    return inside.all(axis=1)
