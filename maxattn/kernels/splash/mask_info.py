"""Splash's `MaskInfo` from our masks: the tiles to visit, their order, and each query's code.

Splash's own construction visits every tile of T x S on the host, which takes seconds at 32,000
tokens. Here the tiles come from `tile_kinds`.
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
    """List for each row of tiles the columns to visit, as splash's (data_next, block_mask).

    Args:
        visited: bool [rows, columns], numpy or traced.
        shrink: put the visited columns first and drop the rest of the grid (numpy alone).

    Returns:
        next: the column of each step; that of the next step that computes, if this one does not, so
            that no fetch is wasted.
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
    """Return for each step the first that computes from there on; after the last, the first."""
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
        kinds: from `tile_kinds`; all tiles but EMPTY ones are visited.
        codes: from `codes_of`, or None if every pair is allowed.
        q_padded: queries after padding.
        by_key: for the kernel of dK and dV, which visits queries key tile by key tile.
        shrink: drop empty tiles from the grid; the fused backward needs all of it.
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
