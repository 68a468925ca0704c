"""Block-sparse lists: the tiles that a mask leaves, of which mixed ones are tested pair by pair.

The lists come from the mask's intervals, never from an array of T x S: constants if all is known
when tracing, computed on the device if positions, ids or lengths are traced. A kernel gets the
lists of a tile row in one of two forms:

    ranges     mixed count, full count, first full tile, mixed tiles ...     full tiles are side by
               side, as of a causal mask or a window
    explicit   count, tiles ...     of mixed and of full tiles, by batch row if these differ
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.masks import FULL, MIXED, Mask
from maxattn.masks.tile_kinds import kinds_by_arrays, tile_kinds

MOST_TILES = 2**27  # of a mask that is known when tracing
# Of one that is known on the device alone, of all batch rows: a full and a mixed tile have an index
# of 4 bytes each, and sorting takes as much again.
MOST_TRACED_TILES = 2**25
MOST_MIXED = 8  # mixed tiles of a tile row, in the form of ranges
PAST = 2**30  # more than any tile
MOST_COMPARED = 1024  # columns of which every two are compared


class Lists(NamedTuple):
    """The lists of all tile rows of one pass, as a kernel reads them.

    Args:
        array: int32, [rows, 3 + mixed] in the form of ranges, else [2, *B, rows, 1 + tiles].
        work: number of tiles of each tile row, [rows], or [B, rows] if batch rows differ.
    """

    array: Any
    work: Any

    @property
    def is_ranges(self) -> bool:
        """Whether the array has the form of ranges."""
        return self.array.ndim == 2

    @property
    def has_mixed(self) -> bool:
        """Whether lists that are known name mixed tiles."""
        return bool((self.array[:, 0] if self.is_ranges else self.array[0, ..., 0]).any())

    @property
    def has_batch(self) -> bool:
        """Whether batch rows have lists of their own."""
        return self.array.ndim == 4


class Tally(NamedTuple):
    """Count the tiles of a mask that are full, mixed and skipped."""

    full: int
    mixed: int
    skipped: int


def known(kinds: np.ndarray) -> Lists:
    """List the tiles of each row of `kinds` [rows, columns], from `tile_kinds`."""
    mixed, full = kinds == MIXED, kinds == FULL
    counts = mixed.sum(axis=1), full.sum(axis=1)
    first = full.argmax(axis=1)
    last = kinds.shape[1] - 1 - full[:, ::-1].argmax(axis=1)
    side_by_side = bool(((counts[1] == 0) | (last - first + 1 == counts[1])).all())
    work = (counts[0] + counts[1]).astype(np.int32)
    most = max(1, int(counts[0].max(initial=0)))
    tiles = _ascending(mixed)[:, :most]
    if side_by_side and most <= MOST_MIXED:
        found = np.concatenate([np.stack([*counts, first], axis=1), tiles], axis=1)
        return Lists(found.astype(np.int32), work)
    most = max(most, int(counts[1].max(initial=0)))
    halves = zip(counts, (_ascending(mixed), _ascending(full)), strict=True)
    found = np.stack([np.concatenate([c[:, None], t[:, :most]], axis=1) for c, t in halves])
    return Lists(found.astype(np.int32), work)


def _ascending(chosen: np.ndarray) -> np.ndarray:
    return np.argsort(~chosen, axis=1, stable=True)


def traced(kinds: Array) -> Lists:
    """List the tiles of each row of `kinds` [*B, rows, columns] on the device."""
    chosen, columns = jnp.stack([kinds == MIXED, kinds == FULL]), kinds.shape[-1]
    at = jnp.arange(columns, dtype=jnp.int32)
    if columns <= MOST_COMPARED:
        # The n-th chosen column is the first one up to which more than n are chosen, so n of them
        # or fewer are chosen up to each column before it. XLA makes two launches of this, and a
        # dozen of a sort.
        up_to = (chosen[..., None, :] & (at[:, None] >= at)).sum(axis=-1, dtype=jnp.int32)
        tiles = (up_to[..., None, :] <= at[:, None]).sum(axis=-1, dtype=jnp.int32)
        count = up_to[..., -1]
    else:
        count = chosen.sum(axis=-1, dtype=jnp.int32)
        tiles = jnp.sort(jnp.where(chosen, at, PAST), axis=-1)
    # One array is a single launch to make.
    return Lists(jnp.concatenate([count[..., None], tiles], axis=-1), count[0] + count[1])


@lru_cache(maxsize=256)
def of_positions(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int], offsets: tuple[int, int], by: str
) -> Lists:
    """List the tiles of a mask of known positions.

    Args:
        mask: bound, without arrays.
        tile: queries and keys of a tile.
        lengths: numbers of queries and keys.
        offsets: positions of the first query and the first key.
        by: "queries" for the lists of a forward, "keys" for those of a backward.
    """
    return known(_by(tile_kinds(mask, *tile, *lengths, *offsets), tile, lengths, by))


def _by(kinds: Any, tile: tuple[int, int], lengths: tuple[int, int], by: str) -> Any:
    """Turn kinds [..., query tiles, key tiles] to the rows of a pass.

    A backward does not test full tiles: one that reaches past the last key becomes mixed.
    """
    if by == "queries":
        return kinds
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    kinds = kinds.swapaxes(-1, -2)
    past = xp.arange(kinds.shape[-2])[:, None] >= lengths[1] // tile[1]
    return xp.where((kinds == FULL) & past, MIXED, kinds)


def on_device(
    mask: Mask,
    tile: tuple[int, int],
    lengths: tuple[int, int],
    offsets: tuple[Any, Any],
    by: str,
) -> Lists:
    """List the tiles of a mask with arrays, or of traced positions; arguments as `of_positions`."""
    if mask.has_data:
        kinds = kinds_by_arrays(mask, tile, lengths, offsets)
        kinds = kinds[0] if kinds.shape[0] == 1 else kinds  # batch rows that are alike share theirs
    else:
        kinds = jnp.asarray(tile_kinds(mask, *tile, *lengths, *offsets))
    return traced(_by(kinds, tile, lengths, by))


@lru_cache(maxsize=4096)
def tally(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> Tally:
    """Count the tiles of a mask of positions from 0 on."""
    empty, full, mixed = mask.block_tally(*tile, *lengths)
    return Tally(full, mixed, empty)
