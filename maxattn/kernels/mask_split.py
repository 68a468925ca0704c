"""A mask in the parts that kernels take, and which tiles of it are empty, full or mixed.

A bound mask is split into its terms: a mask of positions, at most one pair of segment ids, and
padding of keys. The tiles come from the mask's intervals, so no T x S array is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int8

from maxattn.call import Reason
from maxattn.kernels.base import Offset
from maxattn.masks import EMPTY, FULL, MIXED, Full, Mask
from maxattn.masks.spans import MOST_SPANS
from maxattn.masks.tiles import TileBounds, Tiles

Kinds = Any  # int8 [query tiles, key tiles], numpy or traced
QUERY_PAD, KEY_PAD = -1, -2  # segment ids that match nothing


@dataclass(frozen=True)
class SplitMask:
    """Hold a mask as a function of positions, at most one pair of segment ids, and padding."""

    positions: Mask
    segments: Mask | None
    padding: tuple[Mask, ...]

    @property
    def has_ids(self) -> bool:
        """Whether segment ids are needed."""
        return self.segments is not None or bool(self.padding)


def split(mask: Mask) -> SplitMask | Reason:
    """Split a bound mask, or its form, into what splash takes, or say which part it cannot take."""
    positions: Mask = Full()
    segments: list[Mask] = []
    padding: list[Mask] = []
    for term in mask.terms():
        if not term.has_data:
            positions = positions & term
        elif term.segment_ids() is not None:
            segments.append(term)
        elif term.is_key_padding:
            padding.append(term)
        else:
            return _refused(term)
    if len(segments) > 1:
        rule = f"it takes one pair of segment ids, and the mask has {len(segments)} Segments"
        return Reason(
            "flash", "mask Segments & Segments", rule, "number the common segments, or " + REMEDY
        )
    if not positions.has_exact_intervals:
        return _refused_intervals(positions)
    return SplitMask(positions, segments[0] if segments else None, tuple(padding))


REMEDY = "set attention: dot_product with use_memory_efficient_attention: true"


def sort_note(what: str) -> str:
    """Say which order of segment ids skips most, of chunks or tiles."""
    return (
        f"{what} are skipped where the ranges of their ids do not meet: tokens in the order of"
        " their ids (jnp.argsort(ids, axis=1)) skip most; lengths known when tracing go into"
        " masks.Segments.of_lengths, which every kernel skips by"
    )


def _refused(term: Mask) -> Reason:
    what = " and ".join(sorted(_names_with_data(term)))
    if not term.parts():
        rule = (
            "it tests masks of positions, lengths and segments inside the kernel, and takes no"
            " table of pairs"
        )
        remedy = f"say the mask as one of maxattn.masks, or {REMEDY}"
        return Reason("flash", f"mask {what}", rule, remedy)
    rule = f"it takes arrays joined by & alone, and {term} has {what} under | or ~"
    return Reason("flash", f"mask {what} under | or ~", rule, REMEDY)


def _refused_intervals(positions: Mask) -> Reason:
    what = f"mask of {positions.extent.masks} masks"
    rule = f"it tests up to {MOST_SPANS} intervals of keys a query, and the mask has more"
    return Reason("flash", what, rule, REMEDY)


def _names_with_data(mask: Mask) -> set[str]:
    """Name the kinds of mask in it that hold arrays."""
    if not mask.parts():
        return {*mask.names()} if mask.has_data else set()
    return {name for part in mask.parts() for name in _names_with_data(part)}


def segment_ids(
    parts: SplitMask, batch: int, q_len: int, kv_len: int, kv_offset: Offset
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    """Write lengths, flags and segments as segment ids, or None where there are none.

    Ids are equal exactly where the arrays let a query attend: negative ids become ones that match
    nothing.
    """
    if not parts.has_ids:
        return None
    q_ids, kv_ids = jnp.zeros((1, q_len), jnp.int32), jnp.zeros((1, kv_len), jnp.int32)
    if parts.segments is not None:
        given = parts.segments.segment_ids()
        assert given is not None
        q_ids, kv_ids = (jnp.asarray(x).astype(jnp.int32) for x in given)
        q_ids = jnp.where(q_ids < 0, QUERY_PAD, q_ids)
        kv_ids = jnp.where(kv_ids < 0, KEY_PAD, kv_ids)
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
    """Classify the tiles of a mask of positions: numpy where the offsets are ints, else traced."""
    if mask.is_full:  # wherever the tokens are: no lists, whose length scalar memory bounds
        return np.full((-(-q_len // block_q), -(-kv_len // block_kv)), FULL, np.int8)
    if isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array):
        return chunk_kinds(mask, block_q, block_kv, q_len, kv_len, q_offset, kv_offset, jnp)
    if q_offset == 0 and kv_offset == 0:
        return mask.block_map(block_q, block_kv, q_len, kv_len)
    return chunk_kinds(mask, block_q, block_kv, q_len, kv_len, q_offset, kv_offset, np)


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


def known_kinds(
    mask: Mask, blocks: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Any, Any]
) -> Any:
    """Classify chunks by positions alone: numpy where the offsets are, else traced."""
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in offsets) else np
    return chunk_kinds(mask, *blocks, *lengths, *offsets, xp)


def kinds_by_arrays(
    mask: Mask, blocks: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Any, Any]
) -> Int8[Array, "B QB KB"]:
    """Classify chunks by the arrays of a mask too, on the device.

    Args:
        mask: bound.
        blocks: queries and keys of a chunk; the last ones may be ragged.
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
