"""Splash's `MaskInfo` from our masks: the tiles to visit, their order, and each query's code.

Splash's own construction goes through every tile of the T x S square on the host. Here the tiles
come from `tile_kinds`, so 75,600 tokens take well under a second.
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
        shrink: put the visited columns first and cut the rest of the grid away (numpy only: traced
            ones keep it).

    Returns:
        next: the column of each step; at a step that computes nothing, the column of the next step
            that does, so that nothing is fetched in vain.
        runs: 1 where the step computes, else 0.
    """
    traced = isinstance(visited, jax.Array)
    xp: Any = jnp if traced else np
    rows, columns = visited.shape
    if shrink and not traced:
        order = np.argsort(~visited, axis=1, stable=True)[
            :, : max(1, int(visited.sum(axis=1).max()))
        ]
    else:
        order = xp.broadcast_to(xp.arange(columns), (rows, columns))
    runs = xp.take_along_axis(visited, order, axis=1)
    following = _next_that_runs(runs.reshape(-1), xp)
    dtype = column_type(columns)  # scalar memory is small
    return order.reshape(-1)[following].reshape(order.shape).astype(dtype), runs.astype(np.int8)


def _next_that_runs(runs: Any, xp: Any) -> Any:
    """For each step, find the first that computes from there on; after the last, the first."""
    steps = xp.where(runs, xp.arange(runs.shape[0]), runs.shape[0])
    following = (
        np.minimum.accumulate(steps[::-1])[::-1]
        if xp is np
        else jax.lax.cummin(steps, reverse=True)
    )
    return xp.where(
        following < runs.shape[0], following, xp.minimum(following[0], runs.shape[0] - 1)
    )


def mask_info(
    kinds: Kinds, codes: Codes | None, q_padded: int, by_key: bool = False, shrink: bool = True
) -> Any:
    """Build splash's `MaskInfo`.

    Args:
        kinds: from `tile_kinds`; tiles that are not EMPTY are visited.
        codes: from `codes_of`, or None where every pair is allowed.
        q_padded: query length after padding.
        by_key: for the kernel of dK and dV, which goes through queries key tile by key tile.
        shrink: cut what is empty off the grid; the fused backward needs all of it.
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
    """Return the queries' codes, or None where all tiles are full and no key is padding."""
    if not padded_keys and isinstance(kinds, np.ndarray) and bool((kinds == FULL).all()):
        return None
    return encode(mask, q_len, kv_len, q_offset, kv_offset)
