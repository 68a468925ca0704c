"""Which tiles the kernel visits: lists of positions, and marks that segment ids give on the device.

A mark says that a tile is empty, that its mask must be evaluated, or that every pair is allowed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxattn.kernels.splash.calls import Setup
from maxattn.kernels.splash.mask_info import schedule
from maxattn.kernels.splash.tokamax import PARTIAL, WHOLE, marks_of


class Steps(NamedTuple):
    """Hold the steps of the grid, row of tiles by row.

    Args:
        block: the block of keys of each step, or of queries by key, [rows * count].
        mark: of each step; 0 where it computes nothing.
        count: steps of a row.
    """

    block: Int[Array, " rows*count"]
    mark: Int[Array, " rows*count"]
    count: int


def steps_of(setup: Setup, by_key: bool = False) -> Steps | None:
    """List the tiles that the positions leave, or None where every tile is whole.

    Args:
        setup: the mask.
        by_key: a row of tiles is that of a block of keys, and each step is a block of queries.
    """
    marks = marks_of(setup).T if by_key else marks_of(setup)
    traced = not isinstance(marks, np.ndarray)
    if not traced and bool((marks == WHOLE).all()):
        return None
    xp: Any = jnp if traced else np
    block, runs = schedule(marks != 0, shrink=True)
    mark = xp.take_along_axis(marks, block.astype(np.int32), axis=1) * runs
    flat = (jnp.asarray(x, jnp.int32).reshape(-1) for x in (block, mark))
    return Steps(*flat, count=block.shape[1])


def marks_of_ids(
    q_ids: Int[Array, " T"], kv_ids: Int[Array, " S"], block_q: int, block_kv: int
) -> Int[Array, "1 tiles"]:
    """Mark each tile by the ranges of its ids: tiles whose ranges do not meet are empty."""
    queries, keys = q_ids.reshape(-1, block_q), kv_ids.reshape(-1, block_kv)
    q_low, q_high = (f(queries, axis=1)[:, None] for f in (jnp.min, jnp.max))
    k_low, k_high = (f(keys, axis=1)[None] for f in (jnp.min, jnp.max))
    meet = (q_low <= k_high) & (k_low <= q_high)
    same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    marks = jnp.where(same, WHOLE, jnp.where(meet, PARTIAL, 0))
    return marks.astype(jnp.int32).reshape(1, -1)
