"""FlashAttention-4 over the first keys of each batch row, on Hopper GPUs.

The forward's kernel ends its loop at a batch row's length. The backward gets block-sparse lists: a
tile of keys visits all queries or none, and only the tile that a length cuts is tested. Few keys
have few such tiles, which would leave most SMs idle: their backward is split over the queries, as
it is over all pairs (split_queries.py). One tile of keys has a kernel of its own (one_key_tile.py).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from maxattn.kernels.base import Grads, Result, Rows
from maxattn.kernels.fa4 import block_sparse, one_key_tile
from maxattn.kernels.fa4.block_sparse import TilePass
from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.forward_tiles import tile_over_all
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.split_lists import UNKNOWN, ListedWork, bytes_of_split, splits_of
from maxattn.kernels.fa4.split_queries import Dims
from maxattn.kernels.fa4.split_queries_kernel import knows_rows
from maxattn.kernels.fa4.tile_sizes import Tile, backward_tile
from maxattn.kernels.fused.rectangles import PieceInputs

TEST = PairTest(limits=True)


def forward(inputs: PieceInputs, scale: float) -> Result:
    """Return (out, lse) over the first `lengths[b]` keys of each batch row."""
    q, k, lengths = inputs.q, inputs.k, _lengths(inputs)
    tile = tile_over_all(q.shape, k.shape)
    return Result(*block_sparse.forward(q, k, inputs.v, TilePass(tile, scale), lengths))


def backward(inputs: PieceInputs, rows: Rows, scale: float, sms: int) -> Grads:
    """Return (dq, dk, dv) over the same.

    Args:
        inputs: bfloat16 or float16, with lengths.
        rows: of the queries.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    if one_key_tile.takes(inputs):
        return one_key_tile.backward(inputs, rows, scale, sms)
    q, k, lengths = inputs.q, inputs.k, _lengths(inputs)
    tile, splits = backward_tile(q.shape[3], q.shape[1]), 1
    if knows_rows():
        splits = splits_for(q.shape, k.shape, sms)
    lists = lists_by_keys(lengths, tile, (q.shape[1], k.shape[1]), splits)
    return block_sparse.backward(
        inputs, rows, TilePass(tile, scale, lists, TEST, (lengths,), splits=splits)
    )


def splits_for(queries: Dims, keys: Dims, sms: int) -> int:
    """Choose into how many splits of the queries a backward goes, for shapes of q and k."""
    return splits_of(works_for(queries, keys), bytes_of_split(queries, keys), sms)


def works_for(queries: Dims, keys: Dims) -> list[ListedWork]:
    """Return what such a backward may have to do.

    Lengths are not known: it is to end soon on the whole where all keys are real, half, or a
    quarter.
    """
    (batch, t, heads, _), tile = queries, backward_tile(queries[3], queries[1])
    tiles = np.full(-(-keys[1] // tile.keys), -(-t // tile.queries))
    return [ListedWork(tiles, -(-batch * heads // part)) for part in UNKNOWN]


def lists_by_keys(
    limits: Int[Array, " B"], tile: Tile, lengths: tuple[int, int], splits: int
) -> TileLists:
    """List the tiles of queries of each tile of keys, for each split and then each batch row.

    Args:
        limits: real keys of each batch row.
        tile: of the backward.
        lengths: numbers of queries and keys.
        splits: of the queries.
    """
    rows, columns = -(-lengths[1] // tile.keys), -(-lengths[0] // tile.queries)
    most = -(-columns // splits)
    start = jnp.arange(rows, dtype=jnp.int32) * tile.keys
    first = jnp.arange(splits, dtype=jnp.int32)[:, None, None] * most
    count = jnp.clip(columns - first, 0, most)
    some, whole = start < limits[:, None], start + tile.keys <= limits[:, None]
    mixed, full = (
        jnp.where(chosen, count, 0).reshape(-1, rows) for chosen in (some & ~whole, whole)
    )
    index = jnp.arange(most, dtype=jnp.int32)
    if splits > 1:
        index = jnp.broadcast_to(first[..., None] + index, (splits, len(limits), rows, most))
        index = index.reshape(-1, rows, most)
    return TileLists(mixed, index, full, index)


def _lengths(inputs: PieceInputs) -> Int[Array, " B"]:
    assert inputs.lengths is not None and inputs.pairs is None
    return inputs.lengths.astype(jnp.int32)  # pyright: ignore[reportAttributeAccessIssue]
