"""Block-sparse lists: the tiles that a kernel tests pair by pair, and those that it takes whole.

Tiles that a mask leaves empty are in neither list. The lists come from the mask's intervals, never
from an array of T x S: constants where the positions are known, arithmetic on the device where they
are traced.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from maxattn.kernels.base import Offset
from maxattn.kernels.fa4 import set_bits
from maxattn.kernels.fa4.tile_sizes import Tile, TileCount
from maxattn.masks import FULL, MIXED, Mask
from maxattn.masks.blocks import stretches
from maxattn.masks.tile_kinds import tile_kinds

PAST = 2**30  # more than any column


class TileLists(NamedTuple):
    """Name the tiles of each row: those to test, and those to take whole; both ascend.

    Row i tests `mixed[i, :mixed_count[i]]` and takes `full[i, :full_count[i]]` whole.

    Args:
        mixed_count, full_count: [rows] int32, or [B, rows] where batch rows differ.
        mixed, full: [rows, most] int32, [B, rows, most], or [most] where all rows share them;
            what is past a count means nothing.
    """

    mixed_count: Any
    mixed: Any
    full_count: Any
    full: Any

    @property
    def work(self) -> Any:
        """The number of tiles of each row."""
        return self.mixed_count + self.full_count

    @property
    def is_traced(self) -> bool:
        """Whether they are known on the device alone."""
        return isinstance(self.mixed_count, jax.Array)

    def packed(self) -> Int32[Array, "2 *B rows entries"]:
        """Return mixed and full tiles as one array: in each row the count, then the tiles.

        One array is a single launch to make.
        """
        most = max(self.mixed.shape[-1], self.full.shape[-1])
        halves = (self.mixed_count, self.mixed), (self.full_count, self.full)
        return jnp.stack([_with_count(count, tiles, most) for count, tiles in halves])


def _with_count(
    count: Int32[Array, "*B rows"], tiles: Int32[Array, "..."], most: int
) -> Int32[Array, "*B rows entries"]:
    tiles = jnp.pad(tiles, [(0, 0)] * (tiles.ndim - 1) + [(0, most - tiles.shape[-1])])
    each = jnp.broadcast_to(tiles, (*count.shape, most))
    return jnp.concatenate([count[..., None], each], axis=-1)


class Tiling(NamedTuple):
    """Hold the lists of one call: of keys for a tile of queries, of queries for a tile of keys."""

    forward: TileLists
    backward: TileLists


class Tally(NamedTuple):
    """Count the tiles of a mask that are full, mixed and skipped."""

    full: int
    mixed: int
    skipped: int


def lists_of(kinds: Any) -> TileLists:
    """List the tiles of each row of `kinds` [..., rows, columns], from `tile_kinds`."""
    if isinstance(kinds, jax.Array) and set_bits.fits(kinds.shape[-1]):
        count, tiles = set_bits.set_columns(jnp.stack([kinds == MIXED, kinds == FULL]))
        return TileLists(count[0], tiles[0], count[1], tiles[1])
    return TileLists(*_listed(kinds == MIXED), *_listed(kinds == FULL))


def _listed(chosen: Any) -> tuple[Any, Any]:
    count = chosen.sum(axis=-1).astype(np.int32)
    if isinstance(chosen, jax.Array):
        columns = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
        # One array to sort is a single launch of few microseconds; an argsort has two.
        return count, jnp.sort(jnp.where(chosen, columns, PAST), axis=-1)
    order = np.argsort(~chosen, axis=-1, stable=True).astype(np.int32)
    return count, order[..., : max(1, int(count.max()))]


class TilingSpec(NamedTuple):
    """Say which tiles are listed.

    Args:
        mask: bound, of positions alone.
        forward, backward: (queries, keys) of a tile in either pass.
        lengths: local numbers of queries and keys.
    """

    mask: Mask
    forward: tuple[int, int]
    backward: tuple[int, int]
    lengths: tuple[int, int]


def tiling(spec: TilingSpec, offsets: tuple[Offset, Offset]) -> Tiling:
    """List the tiles of both passes; `offsets` are the positions of the first query and key."""
    if any(isinstance(offset, jax.Array) for offset in offsets):
        return _tiling(spec, offsets)
    return _known_tiling(spec, (int(offsets[0]), int(offsets[1])))


def _tiling(spec: TilingSpec, offsets: tuple[Offset, Offset]) -> Tiling:
    mask, lengths, tiles = spec.mask, spec.lengths, (spec.forward, spec.backward)
    forward, backward = (tile_kinds(mask, *tile, *lengths, *offsets) for tile in tiles)
    by_keys = tested_past(backward.T, lengths[1] // spec.backward[1])
    return Tiling(lists_of(forward), lists_of(by_keys))


def tested_past(kinds: Any, whole: int) -> Any:
    """Have what goes past the last key tested: the backward takes full tiles without a test.

    Args:
        kinds: [..., rows, columns], of tiles of keys and of queries.
        whole: how many rows hold nothing but keys.
    """
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    past = xp.arange(kinds.shape[-2])[:, None] >= whole
    return xp.where((kinds == FULL) & past, MIXED, kinds)


_known_tiling = lru_cache(maxsize=64)(_tiling)


def visited(mask: Mask, tile: Tile, lengths: tuple[int, int]) -> TileCount:
    """Count the rows of tiles, and the tiles that are not skipped."""
    count = tally(mask, tile, lengths)
    return TileCount(-(-lengths[0] // tile.queries), count.full + count.mixed)


@lru_cache(maxsize=1024)
def visits_by_queries(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]
) -> Int32[np.ndarray, " rows"]:
    """Count the tiles of keys that each tile of queries visits, under a mask of positions."""
    rows, columns = (-(-length // size) for length, size in zip(lengths, tile, strict=True))
    if mask.is_full:
        return np.full(rows, columns, np.int32)
    found = stretches(mask, *tile, *lengths)
    return np.bincount(found.row, found.end - found.start, rows).astype(np.int32)


@lru_cache(maxsize=1024)
def visits_by_keys(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]
) -> Int32[np.ndarray, " columns"]:
    """Count the tiles of queries that each tile of keys visits, under a mask of positions."""
    rows, columns = (-(-length // size) for length, size in zip(lengths, tile, strict=True))
    if mask.is_full:
        return np.full(columns, rows, np.int32)
    found = stretches(mask, *tile, *lengths)
    changes = np.zeros(columns + 1, np.int32)
    np.add.at(changes, found.start, 1)
    np.add.at(changes, found.end, -1)
    return np.cumsum(changes, dtype=np.int32)[:-1]


@lru_cache(maxsize=4096)
def tally(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> Tally:
    """Count the tiles of a mask of positions."""
    empty, full, mixed = mask.block_tally(*tile, *lengths)
    return Tally(full, mixed, empty)
