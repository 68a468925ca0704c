"""A mask that is no band, as FlashAttention-4 takes it here.

Pairs are tested, in a band or in the mixed tiles of block-sparse lists.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Inputs, Offset
from maxattn.kernels.fa4.block_sparse import TilePass
from maxattn.kernels.fa4.block_sparse_lists import (
    TileLists,
    Tiling,
    TilingSpec,
    tiling,
    visited,
)
from maxattn.kernels.fa4.block_sparse_rows import (
    BACKWARD_CLASSES,
    FORWARD_CLASSES,
    RowClasses,
    heaviest_first,
    row_tiling,
)
from maxattn.kernels.fa4.forward_tiles import forward_tile, library_tile
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.split_lists import split
from maxattn.kernels.fa4.tile_sizes import Dims, Tile, backward_tile
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.masks import Mask
from maxattn.masks.band_pieces import Piece
from maxattn.masks.terms import SplitMask, segment_ids, split_mask


class BlockSparseTiles(NamedTuple):
    """Hold the block-sparse lists of both passes, and the test of pairs in mixed tiles.

    Args:
        tiling: the lists.
        tiles: of the forward and of the backward.
        test: of pairs in mixed tiles.
        all_see: whether every query is known to see a key.
        sorts: whether rows with most tiles start first: where the mask has arrays, and where its
            segments have lengths of their own.
    """

    tiling: Tiling
    tiles: tuple[Tile, Tile]
    test: PairTest
    all_see: bool
    sorts: bool = False

    def forward(self, pairs: Pairs, scale: float, splits: int = 1) -> TilePass:
        """Return what the forward is launched with, in so many splits of the keys."""
        made = self._pass(self.tiles[0], self.tiling.forward, pairs, scale, splits)
        return made._replace(rows=self._rows(self.tiling.forward, FORWARD_CLASSES, splits))

    def backward(self, pairs: Pairs, scale: float, splits: int = 1) -> TilePass:
        """Return what the backward is launched with, in so many splits of the queries."""
        made = self._pass(self.tiles[1], self.tiling.backward, pairs, scale, splits)
        return made._replace(rows=self._rows(self.tiling.backward, BACKWARD_CLASSES, splits))

    def _pass(
        self, tile: Tile, lists: TileLists, pairs: Pairs, scale: float, splits: int
    ) -> TilePass:
        lists = split(lists, splits) if splits > 1 else lists
        return TilePass(tile, scale, lists, self.test, arrays(pairs), splits=splits)

    def _rows(self, lists: TileLists, classes: RowClasses, splits: int) -> Array | None:
        # Splits start in the library's order: they are few, and about as long.
        return heaviest_first(lists, classes) if self.sorts and splits == 1 else None


def listed(inputs: Inputs) -> PieceInputs:
    """Return all pairs as one rectangle, with block-sparse lists of its tiles.

    Known positions are tested in the kernel, from the mask itself. Of traced ones, and of a mask
    that looks numbers up, it gets each query's intervals. Where the mask has arrays, the lists are
    of each batch row.
    """
    mask, ids = positions(inputs.mask), _ids(inputs)
    lengths, offsets = _lengths(inputs), (inputs.q_offset, inputs.kv_offset)
    tile = tile_of(mask, inputs.q.shape, lengths[1], _traced(inputs), ids is not None)
    backward = backward_tile(inputs.q.shape[3], lengths[0])
    if ids is None:
        lists = tiling(TilingSpec(mask, tile, backward, lengths), offsets)
    else:
        lists = row_tiling(inputs.mask, (tile, backward), lengths, offsets)
    lo, hi, test, see = _test(inputs, mask, ids is not None)
    sorts = ids is not None or (mask.looked_up > 0 and not _traced(inputs))
    found = BlockSparseTiles(lists, (tile, backward), test, see, sorts)
    q_ids, kv_ids = ids or (None, None)
    pairs = Pairs(lo, hi, q_ids, kv_ids, found)
    return PieceInputs.whole(inputs.q, inputs.k, inputs.v, pairs)


def _test(inputs: Inputs, mask: Mask, has_ids: bool) -> tuple[Any, Any, PairTest, bool]:
    """Return the intervals that the kernel reads, if any, its test, and whether all queries see."""
    if mask.is_full:
        return None, None, PairTest(has_ids=has_ids), False
    lengths, offsets = _lengths(inputs), (inputs.q_offset, inputs.kv_offset)
    if _traced(inputs):
        lo, hi = _ends(mask, lengths, offsets, jnp)
        return lo, hi, PairTest(intervals=lo.shape[0], has_ids=has_ids), False
    lo, hi = _ends(mask, lengths, offsets, np)
    see = not has_ids and bool((lo < hi).any(axis=0).all())
    if mask.looked_up:
        test = PairTest(intervals=lo.shape[0], has_ids=has_ids)
        return jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32), test, see
    return None, None, PairTest(mask, int(offsets[0]), int(offsets[1]), 0, has_ids), see


def tile_of(
    mask: Mask,
    queries: Dims,
    kv_len: int,
    traced: bool = False,
    has_ids: bool = False,
) -> Tile:
    """Return the tile of a forward over lists.

    Args:
        mask: of positions.
        queries: the shape [B,T,N,H] of q.
        kv_len: number of keys.
        traced: whether positions are known on the device alone: what is skipped is not counted.
        has_ids: whether ids skip tiles too.
    """
    if traced:
        return library_tile(queries[3])
    lengths = queries[1], kv_len
    return forward_tile(queries, kv_len, lambda tile: visited(mask, tile, lengths), has_ids)


def all_see(pairs: Pairs | None) -> bool:
    """Tell whether every query is known to see a key, so that no gradient must be made 0."""
    return pairs is not None and pairs.tiles is not None and pairs.tiles.all_see


def arrays(pairs: Pairs) -> tuple[Array, ...]:
    """List the arrays that a test reads, in the order that it knows."""
    found = pairs.limits, pairs.lo, pairs.hi, pairs.q_ids, pairs.kv_ids
    return tuple(x for x in found if x is not None)


def _split(mask: Mask) -> SplitMask:
    split = split_mask(mask)
    assert isinstance(split, SplitMask), split  # supports() refused it
    return split


def positions(mask: Mask) -> Mask:
    """Return what a mask says of positions alone."""
    return _split(mask).positions


def has_ids(mask: Mask) -> bool:
    """Tell whether pairs are tested by ids too."""
    return _split(mask).has_ids


def own_rows(call: Call) -> int:
    """Count the batch rows that have lists of their own; 0 where arrays make none."""
    found = split_mask(call.mask)
    if not isinstance(found, SplitMask) or not found.has_ids:
        return 0
    axes = jax.tree.leaves(call.mask.leaf_axes())
    return call.batch if any("B" in letters for letters in axes) else 1


def _ids(inputs: Inputs) -> Any:
    """Return the segment ids of queries and keys, where the mask has any."""
    lengths = _lengths(inputs)
    split = _split(inputs.mask)
    return segment_ids(split, inputs.q.shape[0], *lengths, inputs.kv_offset)


def _lengths(inputs: Inputs) -> tuple[int, int]:
    return inputs.q.shape[1], inputs.k.shape[1]


def _traced(inputs: Inputs) -> bool:
    return any(isinstance(x, jax.Array) for x in (inputs.q_offset, inputs.kv_offset))


def pairs_of(inputs: Inputs) -> PieceInputs:
    """Return the narrowest band around a mask, and the test of every pair in it."""
    mask, ids = positions(inputs.mask), _ids(inputs) or (None, None)
    q, k, v, (t, s) = inputs.q, inputs.k, inputs.v, _lengths(inputs)
    if mask.is_full:
        return PieceInputs.whole(q, k, v, Pairs(None, None, *ids))
    traced, offsets = _traced(inputs), (inputs.q_offset, inputs.kv_offset)
    lo, hi = _ends(mask, (t, s), offsets, jnp if traced else np)
    piece = Piece(0, t, 0, s) if traced else _around(lo, hi, t, s)
    pairs = Pairs(jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32), *ids)
    return PieceInputs(q, k, v, pairs, piece)


def _ends(
    mask: Mask, lengths: tuple[int, int], offsets: tuple[Offset, Offset], xp: Any
) -> tuple[Any, Any]:
    """Return each query's intervals of local keys: starts and ends `[M, T]`."""
    t, s = lengths
    found = mask.intervals(xp.arange(t) + offsets[0], xp)
    ends = [tuple(xp.clip(end - offsets[1], 0, s) for end in pair) for pair in found]
    lo, hi = (
        xp.stack([e[i] for e in ends]) if ends else xp.zeros((1, t), np.int32) for i in (0, 1)
    )
    return lo, hi


def _around(lo: np.ndarray, hi: np.ndarray, t: int, s: int) -> Piece:
    """Bound intervals `[M, T]` by a band; a side that bounds nothing, or is negative, is open."""
    some = lo < hi
    if not some.any():
        return Piece(0, t, 0, s)
    row = np.broadcast_to(np.arange(t), lo.shape)[some]
    left, right = int((row - lo[some]).max()), int((hi[some] - 1 - row).max())
    left_bound = left if 0 <= left < t - 1 else None
    return Piece(0, t, 0, s, left_bound, right if 0 <= right < s - 1 else None)
