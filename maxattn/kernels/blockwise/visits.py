"""The key chunks that each query chunk visits: empty chunks are skipped.

The lists come from a mask's intervals, and from bounds of the mask's arrays per chunk, without a
T x S array. If the offsets are ints and the mask has no arrays, the lists are constants. Otherwise
(as for a shard inside `shard_map`), the same arithmetic runs on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.masks import EMPTY, MIXED, Mask
from maxattn.masks.tile_kinds import kinds_by_arrays, tile_kinds


class Visits(NamedTuple):
    """Query chunk i visits key chunks `index[i, :count[i]]`; if `mixed`, the mask is evaluated."""

    index: Any  # [query chunks, most visits] int32
    mixed: Any  # [query chunks, most visits] bool
    count: Any  # [query chunks] int32

    @property
    def static(self) -> bool:
        """Whether the lists are numpy arrays, and so known when tracing."""
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
    """List the key chunks that each query chunk visits; the offsets are ints or traced."""
    if mask.is_full:  # at all offsets
        q_offset = kv_offset = 0
    sizes = (block_q, block_kv), (q_len, kv_len), (q_offset, kv_offset)
    if mask.bounds_tiles and kv_len > block_kv:  # a single key chunk cannot be left out
        by_row = kinds_by_arrays(mask, *sizes)
        # EMPTY or FULL if all batch rows agree, else MIXED.
        kinds = jnp.where((by_row == by_row[:1]).all(axis=0), by_row[0], MIXED)
    else:
        kinds = tile_kinds(mask, *sizes[0], *sizes[1], *sizes[2])
    traced = isinstance(kinds, jax.Array)
    xp: Any = jnp if traced else np
    visited = kinds != EMPTY
    count = visited.sum(axis=1).astype(np.int32)
    order = xp.argsort(~visited, axis=1, stable=True).astype(np.int32)
    most = order.shape[1] if traced else max(1, int(count.max()))
    index = order[:, :most]
    return Visits(index, xp.take_along_axis(kinds == MIXED, index, axis=1), count)
