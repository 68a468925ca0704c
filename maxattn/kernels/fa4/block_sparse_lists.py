"""Which tiles a kernel visits, as lists: for each row of tiles those to test pair by pair, and
those without a test.

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

from maxattn.kernels.base import Offset
from maxattn.kernels.mask_split import tile_kinds
from maxattn.masks import EMPTY, FULL, MIXED, Mask


class TileLists(NamedTuple):
    """For row i of tiles, test `mixed[i, :mixed_count[i]]`, and take `full[i, :full_count[i]]`
    whole; both ascend.

    mixed_count, full_count: [rows] int32.   mixed, full: [rows, most] int32; what is past a count
        means nothing.
    """

    mixed_count: Any
    mixed: Any
    full_count: Any
    full: Any

    @property
    def work(self) -> Any:
        """The number of tiles of each row."""
        return self.mixed_count + self.full_count


class Tiling(NamedTuple):
    """The lists of one call: of keys for each tile of queries, and of queries for each tile of
    keys.
    """

    forward: TileLists
    backward: TileLists


class Tally(NamedTuple):
    """How many tiles of a mask are full, mixed and skipped."""

    full: int
    mixed: int
    skipped: int


def lists_of(kinds: Any, tests_all: bool = False) -> TileLists:
    """List the tiles of each row of `kinds` [rows, columns], from `tile_kinds`; `tests_all`: none
    goes untested.
    """
    mixed, full = (kinds != EMPTY, kinds != kinds) if tests_all else (kinds == MIXED, kinds == FULL)
    return TileLists(*_listed(mixed), *_listed(full))


def _listed(chosen: Any) -> tuple[Any, Any]:
    xp: Any = jnp if isinstance(chosen, jax.Array) else np
    count = chosen.sum(axis=1).astype(np.int32)
    order = xp.argsort(~chosen, axis=1, stable=True).astype(np.int32)
    most = order.shape[1] if xp is jnp else max(1, int(count.max()))
    return count, order[:, :most]


def tiling(
    mask: Mask,
    forward: tuple[int, int],
    backward: tuple[int, int],
    lengths: tuple[int, int],
    offsets: tuple[Offset, Offset],
    tests_all: bool,
) -> Tiling:
    """List the tiles of both passes.

    Args:
        mask: bound, of positions alone.
        forward, backward: (queries, keys) of a tile in either pass.
        lengths: local numbers of queries and keys.
        offsets: positions of the first local query and key; ints or traced.
        tests_all: whether something else than `mask` is tested too, so that no tile may go
            untested.
    """
    if any(isinstance(offset, jax.Array) for offset in offsets):
        return _tiling(mask, forward, backward, lengths, offsets, tests_all)
    return _known_tiling(
        mask, forward, backward, lengths, (int(offsets[0]), int(offsets[1])), tests_all
    )


def _tiling(
    mask: Mask,
    forward: tuple[int, int],
    backward: tuple[int, int],
    lengths: tuple[int, int],
    offsets: tuple[Offset, Offset],
    tests_all: bool,
) -> Tiling:
    kinds = [tile_kinds(mask, *tile, *lengths, *offsets) for tile in (forward, backward)]
    whole = lengths[1] // backward[1]
    return Tiling(
        lists_of(kinds[0], tests_all), lists_of(_tested_past(kinds[1].T, whole), tests_all)
    )


def _tested_past(kinds: Any, whole: int) -> Any:
    """Have what goes past the last key tested: the backward takes full tiles without a look at the
    lengths.

    Args:
        kinds: [rows, columns], of tiles of keys and of queries.
        whole: how many rows hold nothing but keys.
    """
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    past = xp.arange(kinds.shape[0])[:, None] >= whole
    return xp.where((kinds == FULL) & past, MIXED, kinds)


_known_tiling = lru_cache(maxsize=64)(_tiling)


def visited(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> int:
    """Count the pairs in tiles that are not skipped."""
    count = tally(mask, tile, lengths)
    return (count.full + count.mixed) * tile[0] * tile[1]


def tally(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> Tally:
    """Count the tiles of a mask of positions."""
    counts = np.bincount(mask.block_map(*tile, *lengths).ravel(), minlength=3)
    return Tally(int(counts[FULL]), int(counts[MIXED]), int(counts[EMPTY]))
