"""A mask that is no band, as FlashAttention-4 takes it here: pairs to test, in a band or in lists
of tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels import mask_split
from maxattn.kernels.base import Offset
from maxattn.kernels.fa4.block_sparse_lists import Tiling, tally, tiling, visited
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.tile_sizes import Tile, backward_tile, forward_tile
from maxattn.kernels.fused.kernel import Pairs
from maxattn.kernels.fused.pieces import Piece
from maxattn.masks import Mask


class Tiles(NamedTuple):
    """The lists of both passes and the tiles that they are of, and the test of pairs in mixed
    tiles.
    """

    tiling: Tiling
    tiles: tuple[Tile, Tile]
    test: PairTest
    all_see: bool


def listed(
    mask: Mask, q: Array, k: Array, q_offset: Offset, kv_offset: Offset
) -> tuple[Piece, Pairs]:
    """Return all pairs as one rectangle, with lists of its tiles.

    Known positions are tested in the kernel, from the mask itself; of traced ones it gets each
    query's intervals.
    """
    split = _split(mask)
    lengths, offsets = (q.shape[1], k.shape[1]), (q_offset, kv_offset)
    ids = mask_split.segment_ids(split, q.shape[0], *lengths, kv_offset)
    traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
    tiles = tile_of(split.positions, q.shape[3], lengths, traced), backward_tile(q.shape[3])
    lists = tiling(split.positions, *tiles, lengths, offsets, ids is not None)
    if traced:
        lo, hi = _ends(split.positions, lengths, offsets, jnp)
        found = Tiles(lists, tiles, PairTest(intervals=lo.shape[0], has_ids=ids is not None), False)
        return Piece(0, lengths[0], 0, lengths[1]), Pairs(lo, hi, *(ids or (None, None)), found)
    lo, hi = _ends(split.positions, lengths, offsets, np)
    see = ids is None and bool((lo < hi).any(axis=0).all())
    found = Tiles(
        lists,
        tiles,
        PairTest(split.positions, int(q_offset), int(kv_offset), 0, ids is not None),
        see,
    )
    return Piece(0, lengths[0], 0, lengths[1]), Pairs(None, None, *(ids or (None, None)), found)


def tile_of(mask: Mask, head_dim: int, lengths: tuple[int, int], traced: bool = False) -> Tile:
    """Return the tile of a forward under a mask of positions, whose tiles are not counted where it
    is traced.
    """
    return forward_tile(head_dim, None if traced else lambda tile: visited(mask, tile, lengths))


def all_see(pairs: Pairs) -> bool:
    """Tell whether every query is known to see a key, so that no row of its gradient must be made
    0.
    """
    return pairs.tiles is not None and pairs.tiles.all_see


def arrays(pairs: Pairs) -> tuple[Array, ...]:
    """List the arrays that a test reads, in the order that it knows."""
    return tuple(x for x in (pairs.lo, pairs.hi, pairs.q_ids, pairs.kv_ids) if x is not None)


def _split(mask: Mask) -> mask_split.Split:
    split = mask_split.split(mask)
    assert isinstance(split, mask_split.Split), split  # supports() refused it
    return split


def positions(mask: Mask) -> Mask:
    """Return what a mask says of positions alone."""
    return _split(mask).positions


def lists_line(call: Call, sharded: bool) -> str:
    """Say how many tiles the forward goes through."""
    lengths = call.q_len, call.kv_len
    tile = tile_of(positions(call.mask), call.head_dim, lengths, sharded)
    what = f"lists of {tile.queries}x{tile.keys} tiles"
    if sharded:
        return f"{what}, made on the device from its positions"
    count = tally(positions(call.mask), tile, lengths)
    ids = _split(call.mask).has_ids
    tested = (
        f"{count.full + count.mixed} tested" if ids else f"{count.full} full, {count.mixed} mixed"
    )
    return f"{what}: {tested}, skipped {count.skipped} of {sum(count)}"


def pairs_of(
    mask: Mask, q: Array, k: Array, q_offset: Offset, kv_offset: Offset
) -> tuple[Piece, Pairs]:
    """Return the narrowest band around a mask, and the test of every pair in it."""
    split = _split(mask)
    t, s = q.shape[1], k.shape[1]
    ids = mask_split.segment_ids(split, q.shape[0], t, s, kv_offset)
    piece, lo, hi = Piece(0, t, 0, s), None, None
    if not split.positions.is_full:
        traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
        lo, hi = _ends(split.positions, (t, s), (q_offset, kv_offset), jnp if traced else np)
        piece = piece if traced else _around(lo, hi, t, s)
        lo, hi = jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32)
    return piece, Pairs(lo, hi, *(ids or (None, None)))


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
    """Bound intervals `[M, T]` by a band; a side that bounds nothing, or would be negative, is left
    open.
    """
    some = lo < hi
    if not some.any():
        return Piece(0, t, 0, s)
    row = np.broadcast_to(np.arange(t), lo.shape)[some]
    left, right = int((row - lo[some]).max()), int((hi[some] - 1 - row).max())
    return Piece(
        0, t, 0, s, left if 0 <= left < t - 1 else None, right if 0 <= right < s - 1 else None
    )
