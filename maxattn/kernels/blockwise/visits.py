"""Which key chunks each query chunk visits: the lists by which empty chunks are skipped.

From a mask's intervals alone, so no T x S array is made. With numpy offsets the lists are
constants; with traced offsets (a shard's position inside `shard_map`) the same arithmetic runs on
the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.kernels.mask_split import chunk_kinds
from maxattn.masks import EMPTY, MIXED, Mask


class Visits(NamedTuple):
    """Hold the key chunks that each query chunk visits.

    Query chunk i visits `index[i, :count[i]]`, and tests the mask where `mixed` is True.

    Args:
        index: [query chunks, most visits] int32.
        mixed: [query chunks, most visits] bool.
        count: [query chunks] int32.
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
