"""What a kernel reads of a mask: lists of the tiles that are not empty, and arrays of the test.

The lists come from the mask's intervals, never from a T x S array. They are constants if the mask
is known when tracing, and computed on the device if positions, ids or lengths are traced. A tile
row (a query tile in a forward, a key tile in a backward) has its lists in one of two forms:

    ranges     mixed count, full count, first full tile, mixed tiles ...     if full tiles are
               contiguous, as in a causal mask or a window
    explicit   count, tiles ...     for mixed and for full tiles, per batch row if these differ
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4.mask_test import PairTest
from maxattn.masks import FULL, MIXED, Mask
from maxattn.masks.blocks import stretches
from maxattn.masks.terms import KEY_PAD, QUERY_PAD, segment_ids, sort_terms, supported_split
from maxattn.masks.tile_kinds import kinds_by_arrays, tile_kinds

if TYPE_CHECKING:
    from maxattn.kernels.fa4.problem import Problem

MOST_TILES = 2**27  # most tiles of a mask that is known when tracing
# Most tiles, over all batch rows, in lists that are made on the device: each tile has 4 bytes in
# the mixed list and 4 in the full list, and sorting takes as much again.
MOST_TRACED_TILES = 2**25
MOST_MIXED = 8  # most mixed tiles of a tile row in the form of ranges
PAST = 2**30  # larger than any tile's index
PAD = 256  # more than any tile, since the test also reads arrays past the last query and key
BITS, MOST_WORDS = 32, 64  # the tiles of a row as bits of words: most words that are not sorted


class Masked(NamedTuple):
    """A kernel's operands for a mask."""

    lists: Lists | None = None  # the lists of tiles; None if no pair is tested
    test: PairTest | None = None  # the test of pairs in mixed tiles; None without lists
    arrays: tuple[Array, ...] = ()  # int32 arrays that the test reads; or the bias
    # number of real keys of each batch row, int32 [B]; None for other kinds of mask
    lengths: Array | None = None
    all_see: bool = True  # whether every query is known to see a key


def masked_inputs(p: Problem, tile: tuple[int, int], inputs: Inputs, by: str) -> Masked:
    """Return the lists, the test and the arrays that one pass needs for a mask.

    Args:
        p: the problem of the inputs.
        tile: the launch's tile.
        inputs: the arrays, after `real_keys_first` (kernels/base.py).
        by: "queries" in a forward, "keys" in a backward.
    """
    if p.kind == "dense":
        return Masked(arrays=() if inputs.bias is None else (inputs.bias,))
    at = inputs.q_offset, inputs.kv_offset
    if p.kind == "lengths":
        found = sort_terms(inputs.mask).lengths(p.batch, p.kv_len, at[1])
        assert found is not None
        return Masked(lengths=found.astype(jnp.int32), all_see=False)
    lengths, split = (p.q_len, p.kv_len), supported_split(inputs.mask)
    ids = segment_ids(split, p.batch, *lengths, at[1]) or ()
    if p.kind == "known":
        tiles = of_positions(p.mask, tile, lengths, p.offsets, by)
    else:
        mask = inputs.mask if ids else split.positions
        tiles = on_device(mask, tile, lengths, at, by)
    test, arrays, all_see = _test(p, split.positions, at)
    return Masked(tiles, test, (*arrays, *map(_padded, ids, (QUERY_PAD, KEY_PAD))), None, all_see)


def _test(p: Problem, positions: Any, at: Any) -> tuple[PairTest, tuple[Array, ...], bool]:
    """Return the test of pairs, the intervals that it reads, and whether all queries see a key.

    If positions are known, the kernel evaluates the mask. If they are traced, or the mask looks
    numbers up in a table, the kernel reads each query's intervals from arrays.
    """
    has_ids = p.kind == "ids"
    if positions.is_full:
        return PairTest(has_ids=has_ids), (), False
    is_traced, ends = any(isinstance(x, jax.Array) for x in at), intervals(positions, p, at)
    all_see = not is_traced and not has_ids and bool((ends[0] < ends[1]).any(axis=0).all())
    if is_traced or positions.looked_up:
        arrays = tuple(_padded(jnp.asarray(x), KEY_PAD) for x in ends)
        return PairTest(intervals=len(ends[0]), has_ids=has_ids), arrays, all_see
    return PairTest(positions, int(at[0]), int(at[1]), 0, has_ids), (), all_see


def intervals(positions: Any, p: Problem, at: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return the starts and ends [M, T] of each query's local keys; numpy if `at` is known."""
    xp: Any = jnp if any(isinstance(x, jax.Array) for x in at) else np
    found = positions.intervals(xp.arange(p.q_len) + at[0], xp)
    found = found or ((xp.zeros(p.q_len, np.int32),) * 2,)  # nothing is allowed
    lo, hi = (xp.stack([xp.clip(x[i] - at[1], 0, p.kv_len) for x in found]) for i in (0, 1))
    return lo, hi


def _padded(x: Array, fill: int) -> Array:
    return jnp.pad(x.astype(jnp.int32), ((0, 0), (0, PAD)), constant_values=fill)


# ---- lists ---------------------------------------------------------------------------------------


class Lists(NamedTuple):
    """The lists of all tile rows of one pass, as a kernel reads them."""

    array: Any  # int32, [rows, 3 + mixed] in the form of ranges, else [2, *B, rows, 1 + tiles]
    work: Any  # number of tiles in each tile row, [rows], or [B, rows] if batch rows differ

    @property
    def is_ranges(self) -> bool:
        """Whether the array has the form of ranges."""
        return self.array.ndim == 2

    @property
    def has_mixed(self) -> bool:
        """Whether any tile is mixed, for lists that are known when tracing."""
        return bool((self.array[:, 0] if self.is_ranges else self.array[0, ..., 0]).any())


def known(kinds: np.ndarray) -> Lists:
    """Return the lists of all tile rows from a numpy array of tile kinds [rows, columns]."""
    mixed, full = kinds == MIXED, kinds == FULL
    counts = mixed.sum(axis=1), full.sum(axis=1)
    first = full.argmax(axis=1)
    last = kinds.shape[1] - 1 - full[:, ::-1].argmax(axis=1)
    side_by_side = bool(((counts[1] == 0) | (last - first + 1 == counts[1])).all())
    work = (counts[0] + counts[1]).astype(np.int32)
    most = max(1, int(counts[0].max(initial=0)))
    tiles = _ascending(mixed, most)
    if side_by_side and most <= MOST_MIXED:
        found = np.concatenate([np.stack([*counts, first], axis=1), tiles], axis=1)
        return Lists(found.astype(np.int32), work)
    most = max(most, int(counts[1].max(initial=0)))
    halves = zip(counts, (mixed, full), strict=True)
    found = np.stack([np.column_stack([c, _ascending(x, most)]) for c, x in halves])
    return Lists(found.astype(np.int32), work)


def _ascending(chosen: np.ndarray, most: int) -> np.ndarray:
    """List the chosen columns of each row [rows, columns] in the first of `most` places, then 0."""
    row, column = np.nonzero(chosen)
    counts = chosen.sum(axis=1)
    place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    out = np.zeros((len(chosen), most), np.int32)
    out[row, place] = column
    return out


def traced(kinds: Array) -> Lists:
    """Return the lists of all tile rows from traced tile kinds [*B, rows, columns]."""
    chosen, columns = jnp.stack([kinds == MIXED, kinds == FULL]), kinds.shape[-1]
    if columns <= BITS * MOST_WORDS:
        count, tiles = _set_columns(chosen)
    else:
        count = chosen.sum(axis=-1, dtype=jnp.int32)
        tiles = jnp.sort(jnp.where(chosen, jnp.arange(columns, dtype=jnp.int32), PAST), axis=-1)
    # XLA makes one array in a single launch.
    return Lists(jnp.concatenate([count[..., None], tiles], axis=-1), count[0] + count[1])


def _set_columns(chosen: Array) -> tuple[Array, Array]:
    """Return how many columns of each row are chosen, and the chosen columns, ascending.

    The columns are bits of 32-bit words. The n-th chosen column is in the first word up to which
    more than n bits are set. XLA makes a few launches of this, and a dozen of a sort.
    """
    room = [(0, 0)] * (chosen.ndim - 1) + [(0, -chosen.shape[-1] % BITS)]
    bits, bit = jnp.pad(chosen, room), jnp.arange(BITS, dtype=jnp.uint32)
    bits = bits.reshape(*chosen.shape[:-1], -1, BITS).astype(jnp.uint32)
    words = (bits << bit).sum(axis=-1, dtype=jnp.uint32)
    at, n = jnp.arange(words.shape[-1]), jnp.arange(chosen.shape[-1], dtype=jnp.int32)
    sizes = jax.lax.population_count(words).astype(jnp.int32)
    through = jnp.where(at <= at[:, None], sizes[..., None, :], 0).sum(axis=-1, dtype=jnp.int32)
    passed = (through[..., None, :] <= n[:, None]).sum(axis=-1, dtype=jnp.int32)  # words before
    its = jnp.minimum(passed, words.shape[-1] - 1)
    word, before = (jnp.take_along_axis(x, its, axis=-1) for x in (words, through - sizes))
    up_to = jax.lax.population_count(word[..., None] & ((np.uint32(2) << bit) - np.uint32(1)))
    inside = (up_to.astype(jnp.int32) <= (n - before)[..., None]).sum(axis=-1, dtype=jnp.int32)
    return through[..., -1], BITS * its + inside


@lru_cache(maxsize=256)
def of_positions(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int], offsets: tuple[int, int], by: str
) -> Lists:
    """Return the lists of a mask of positions that are known when tracing.

    Args:
        mask: the bound mask, without arrays.
        tile, lengths: numbers of queries and keys in a tile, and in all.
        offsets: positions of the first query and of the first key.
        by: "queries" for the lists of a forward, "keys" for those of a backward.
    """
    return known(_by(tile_kinds(mask, *tile, *lengths, *offsets), tile, lengths, by))


@lru_cache(maxsize=4096)
def work(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int], offsets: tuple[int, int], by: str
) -> np.ndarray:
    """Count each tile row's tiles; from position 0 on without a table, for millions of tokens."""
    if offsets != (0, 0):
        return of_positions(mask, tile, lengths, offsets, by).work
    found, (rows, columns) = stretches(mask, *tile, *lengths), _shape(tile, lengths)
    if by == "queries":
        return np.bincount(found.row, found.end - found.start, rows).astype(np.int32)
    begun, ended = (np.bincount(x, minlength=columns + 1) for x in (found.start, found.end))
    return np.cumsum(begun - ended)[:columns].astype(np.int32)


def _shape(tile: tuple[int, int], lengths: tuple[int, int]) -> tuple[int, int]:
    return -(-lengths[0] // tile[0]), -(-lengths[1] // tile[1])


def _by(kinds: Any, tile: tuple[int, int], lengths: tuple[int, int], by: str) -> Any:
    """Transpose kinds [..., query tiles, key tiles] if `by` is "keys", as in a backward.

    A backward does not test full tiles, so a full tile that reaches past the last key turns mixed.
    """
    if by == "queries":
        return kinds
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    kinds = kinds.swapaxes(-1, -2)
    past = xp.arange(kinds.shape[-2])[:, None] >= lengths[1] // tile[1]
    return xp.where((kinds == FULL) & past, MIXED, kinds)


def on_device(
    mask: Mask, tile: tuple[int, int], lengths: tuple[int, int], offsets: tuple[Any, Any], by: str
) -> Lists:
    """Return the lists of a mask with arrays or traced positions; see `of_positions`."""
    if mask.has_data:
        kinds = kinds_by_arrays(mask, tile, lengths, offsets)
        kinds = kinds[0] if kinds.shape[0] == 1 else kinds  # all batch rows share the lists
    else:
        kinds = jnp.asarray(tile_kinds(mask, *tile, *lengths, *offsets))
    return traced(_by(kinds, tile, lengths, by))


@lru_cache(maxsize=4096)
def tally(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> tuple[int, int, int]:
    """Return the numbers of empty, full and mixed tiles, from position 0 on."""
    return mask.block_tally(*tile, *lengths)
