"""Make splash's `MaskInfo` from a maxattn mask: the tiles to visit in order, the queries' codes.

`tile_kinds` finds the tiles. Splash's own code would visit every tile of T x S on the host, which
takes seconds at 32,000 tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.jax_private import splash as jax_splash
from maxattn.kernels.base import Offset
from maxattn.kernels.splash.mask_codes import Codes, encode
from maxattn.kernels.splash.scalar_memory import column_type
from maxattn.masks import EMPTY, FULL, Mask
from maxattn.masks.tile_kinds import Kinds


def schedule(visited: Any, shrink: bool) -> tuple[Any, Any]:
    """List the tile columns to visit in each tile row, as splash's (data_next, block_mask).

    Args:
        visited: bool [tile rows, tile columns], numpy or traced.
        shrink: whether to put visited columns first and cut all rows to the longest (numpy only).

    Returns:
        next: the column of each step; for a step that computes nothing, the column of the next step
            that computes, so that no fetch is wasted.
        runs: 1 for a step that computes, else 0.
    """
    traced = isinstance(visited, jax.Array)
    xp: Any = jnp if traced else np
    rows, columns = visited.shape
    if shrink and not traced:
        most = max(1, int(visited.sum(axis=1).max()))
        order = np.argsort(~visited, axis=1, stable=True)[:, :most]
    else:
        order = xp.broadcast_to(xp.arange(columns), (rows, columns))
    runs = xp.take_along_axis(visited, order, axis=1)
    following = _next_that_runs(runs.reshape(-1), xp)
    dtype = column_type(columns)  # scalar memory is small
    return order.reshape(-1)[following].reshape(order.shape).astype(dtype), runs.astype(np.int8)


def _next_that_runs(runs: Any, xp: Any) -> Any:
    """Replace each idle step by the next step that computes; after the last one, by the first."""
    count = runs.shape[0]
    steps = xp.where(runs, xp.arange(count), count)
    if xp is np:
        following = np.minimum.accumulate(steps[::-1])[::-1]
    else:
        following = jax.lax.cummin(steps, reverse=True)
    return xp.where(following < count, following, xp.minimum(following[0], count - 1))


def mask_info(
    kinds: Kinds, codes: Codes | None, q_padded: int, by_key: bool = False, shrink: bool = True
) -> Any:
    """Build splash's `MaskInfo`.

    Args:
        kinds: the result of `tile_kinds`; tiles that are not EMPTY are visited.
        codes: the result of `codes_of`, or None if every pair is allowed.
        q_padded: number of queries after padding.
        by_key: whether the kernel loops over the query tiles of each key tile (dK and dV).
        shrink: whether to drop empty tiles from the grid; the fused backward needs every tile.
    """
    values = None if codes is None else codes.padded(q_padded)
    if isinstance(kinds, np.ndarray) and bool((kinds != EMPTY).all()):
        return jax_splash.mask_info(None, None, values)
    visited = kinds != EMPTY
    data, runs = schedule(visited.T if by_key else visited, shrink)
    if by_key:
        data, runs = data.T, runs.T
    return jax_splash.mask_info(jnp.asarray(data)[None], jnp.asarray(runs)[None], values)


def codes_of(
    mask: Mask,
    kinds: Kinds,
    q_len: int,
    kv_len: int,
    padded_keys: bool,
    q_offset: Offset,
    kv_offset: Offset,
) -> Codes | None:
    """Return the queries' codes, or None if all tiles are full and no key is padding."""
    if not padded_keys and isinstance(kinds, np.ndarray) and bool((kinds == FULL).all()):
        return None
    return encode(mask, q_len, kv_len, q_offset, kv_offset)
