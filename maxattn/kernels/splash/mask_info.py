"""Splash's `MaskInfo` from our masks: which tiles the kernel visits, in what order, and each
query's code.

Splash's own construction goes through every tile of the T x S square on the host. Here the tiles
come from `Mask.block_map` (or from intervals on the device where an offset is traced), so 75,600
tokens take well under a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxattn.call import Reason
from maxattn.jax_private import splash as jax_splash
from maxattn.kernels.base import Offset
from maxattn.kernels.blockwise.visits import chunk_kinds
from maxattn.kernels.splash.mask_codes import Rows, encode
from maxattn.masks import EMPTY, FULL, Full, KeyPadding, Mask, Segments

Kinds = Any  # int8 [query tiles, key tiles], numpy or traced
QUERY_PAD, KEY_PAD = -1, -2  # segment ids that match nothing


@dataclass(frozen=True)
class Split:
    """A mask in the two forms that splash takes: a function of positions, and at most one pair of
    segment ids.
    """

    positions: Mask
    segments: Segments | None
    padding: tuple[KeyPadding, ...]

    @property
    def has_ids(self) -> bool:
        """Whether segment ids are needed."""
        return self.segments is not None or bool(self.padding)


def split(mask: Mask) -> Split | Reason:
    """Split a bound mask, or its form, into what splash takes, or say which part it cannot take."""
    positions: Mask = Full()
    segments: list[Segments] = []
    padding: list[KeyPadding] = []
    for term in mask.terms():
        if not term.has_data:
            positions = positions & term
        elif isinstance(term, Segments):
            segments.append(term)
        elif isinstance(term, KeyPadding):
            padding.append(term)
        else:
            return _refused(term)
    if len(segments) > 1:
        rule = f"it takes one pair of segment ids, and the mask has {len(segments)} Segments"
        return Reason(
            "flash", "mask Segments & Segments", rule, "number the common segments, or " + REMEDY
        )
    return Split(positions, segments[0] if segments else None, tuple(padding))


REMEDY = "set attention: dot_product with use_memory_efficient_attention: true"


def _refused(term: Mask) -> Reason:
    if term.names() == ("Dense",):
        rule = (
            "it tests masks of positions, lengths and segments inside the kernel, and takes no"
            " table of pairs"
        )
        return Reason(
            "flash", "mask Dense", rule, f"say the mask as one of maxattn.masks, or {REMEDY}"
        )
    what = " and ".join(n for n in term.names() if n in ("Dense", "KeyPadding", "Segments"))
    rule = f"it takes arrays joined by & alone, and {term} has {what} under | or ~"
    return Reason("flash", f"mask {what} under | or ~", rule, REMEDY)


def segment_ids(
    parts: Split, batch: int, q_len: int, kv_len: int, kv_offset: Offset
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    """Write lengths, flags and segments as segment ids of queries and keys, or None where there are
    none.

    Ids are equal exactly where the arrays let a query attend: negative ids become ones that match
    nothing.
    """
    if not parts.has_ids:
        return None
    q_ids, kv_ids = jnp.zeros((1, q_len), jnp.int32), jnp.zeros((1, kv_len), jnp.int32)
    if parts.segments is not None:
        q_ids, kv_ids = (
            jnp.asarray(x).astype(jnp.int32) for x in (parts.segments.q_ids, parts.segments.kv_ids)
        )
        q_ids, kv_ids = (
            jnp.where(q_ids < 0, QUERY_PAD, q_ids),
            jnp.where(kv_ids < 0, KEY_PAD, kv_ids),
        )
    for term in parts.padding:
        real = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)[:, 0, 0]
        kv_ids = jnp.where(real, kv_ids, KEY_PAD)
    return jnp.broadcast_to(q_ids, (batch, q_len)), jnp.broadcast_to(kv_ids, (batch, kv_len))


def tile_kinds(
    mask: Mask,
    block_q: int,
    block_kv: int,
    q_len: int,
    kv_len: int,
    q_offset: Offset,
    kv_offset: Offset,
) -> Kinds:
    """Classify the tiles of a mask of positions: numpy where the offsets are ints, traced where one
    is.
    """
    if mask.is_full:  # wherever the tokens are: no lists, whose length scalar memory bounds
        return np.full((-(-q_len // block_q), -(-kv_len // block_kv)), FULL, np.int8)
    if isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array):
        return chunk_kinds(mask, block_q, block_kv, q_len, kv_len, q_offset, kv_offset, jnp)
    if q_offset == 0 and kv_offset == 0:
        return mask.block_map(block_q, block_kv, q_len, kv_len)
    return chunk_kinds(mask, block_q, block_kv, q_len, kv_len, q_offset, kv_offset, np)


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
    dtype = (
        np.int8 if columns <= 128 else np.int16 if columns <= 2**15 else np.int32
    )  # scalar memory is small
    return order.reshape(-1)[following].reshape(order.shape).astype(dtype), runs.astype(np.int8)


def _next_that_runs(runs: Any, xp: Any) -> Any:
    """For each step, find the first that computes from there on; past the last one, the first of
    all.
    """
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
    kinds: Kinds, rows: Rows | None, q_padded: int, by_key: bool = False, shrink: bool = True
) -> Any:
    """Build splash's `MaskInfo`.

    Args:
        kinds: from `tile_kinds`; tiles that are not EMPTY are visited.
        rows: from `encode`, or None where every pair is allowed.
        q_padded: query length after padding.
        by_key: for the kernel of dK and dV, which goes through queries key tile by key tile.
        shrink: cut what is empty off the grid; the fused backward needs all of it.
    """
    values = None if rows is None else jnp.pad(rows.values, (0, q_padded - rows.values.shape[0]))
    if isinstance(kinds, np.ndarray) and bool((kinds != EMPTY).all()):
        return jax_splash.mask_info(None, None, values)
    visited = kinds != EMPTY
    data, runs = schedule(visited.T if by_key else visited, shrink)
    if by_key:
        data, runs = data.T, runs.T
    return jax_splash.mask_info(jnp.asarray(data)[None], jnp.asarray(runs)[None], values)


def rows_of(
    mask: Mask,
    kinds: Kinds,
    q_len: int,
    kv_len: int,
    padded_keys: bool,
    q_offset: Offset,
    kv_offset: Offset,
) -> Rows | None:
    """Return each query's code, or None where the tiles are all full and no key is padding."""
    if not padded_keys and isinstance(kinds, np.ndarray) and bool((kinds == FULL).all()):
        return None
    return encode(mask, q_len, kv_len, q_offset, kv_offset)
