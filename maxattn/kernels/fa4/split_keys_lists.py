"""FlashAttention-4's forward over block-sparse lists, split over the keys where SMs would be idle.

A thread block takes a tile of queries of one head, against the tiles of keys in its list. Few
queries beside a long cache are fewer thread blocks than a GPU has SMs: every list is then cut into
as many splits, and the results of splits are merged, as they are over all pairs (split_keys.py).
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Result
from maxattn.kernels.fa4 import block_sparse
from maxattn.kernels.fa4 import launch as fa4_launch
from maxattn.kernels.fa4.alignment import ALIGNED, library
from maxattn.kernels.fa4.block_sparse import TilePass
from maxattn.kernels.fa4.block_sparse_lists import visits_by_queries
from maxattn.kernels.fa4.kernel_calls import run_list_splits
from maxattn.kernels.fa4.mask_inputs import BlockSparseTiles, tile_of
from maxattn.kernels.fa4.split_keys import (
    BYTES_A_US,
    LEAST_GAIN,
    LEAST_US,
    MERGE_US,
    MOST_BYTES,
    MOST_SPLITS,
    PAIRS_A_US,
    READ_A_US,
    wide,
)
from maxattn.kernels.fa4.split_keys_forward import merged
from maxattn.kernels.fa4.split_keys_kernel import knows_operands
from maxattn.kernels.fa4.split_lists import ListedWork, may_split_tiles
from maxattn.kernels.fa4.split_queries import Dims
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks.terms import SplitMask, split_mask


class ListSplits(NamedTuple):
    """Say into how many splits of the keys every list goes.

    Attributes:
        splits: 1 where none pays.
        share: of the time of the lists as they are, which a forward then takes.
    """

    splits: int = 1
    share: float = 1.0


@lru_cache(maxsize=1024)
def splits_for_call(call: Call, queries: Dims, keys: Dims, sms: int) -> ListSplits:
    """Choose for the forward of a call with a static mask that goes by lists.

    Args:
        call: masked by positions.
        queries, keys: shapes [B,T,N,H] of q and [B,S,K,H] of k.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    found = split_mask(call.mask)
    if call.mask.is_full or call.mask.has_data or call.sharded:
        return ListSplits()
    if not isinstance(found, SplitMask):
        return ListSplits()
    mask, lengths = found.positions, (queries[1], keys[1])
    # Rows of tiles are at least as many as with the largest tile.
    least = -(-queries[1] // 192), -(-keys[1] // 80)
    if not may_split_tiles(least, queries[0] * queries[2], sms):
        return ListSplits()
    tile = tile_of(mask, queries, keys[1])
    return splits_of(visits_by_queries(mask, tile, lengths), tile, queries, keys, sms)


def splits_of(tiles: np.ndarray, tile: Tile, queries: Dims, keys: Dims, sms: int) -> ListSplits:
    """Choose what ends first, the merge included; nothing where that gains less than the margin.

    Args:
        tiles: [rows] of keys that each tile of queries visits.
        tile: their size.
        queries, keys, sms: as for `splits_for_call`.
    """
    work, width = ListedWork(tiles, queries[0] * queries[2]), wide(queries[3])
    blocks = len(tiles) * work.lanes
    result = 4 * tile.queries * width * blocks
    if not may_split_tiles((len(tiles), -(-keys[1] // tile.keys)), work.lanes, sms):
        return ListSplits()
    read = 4 * tile.keys * width * keys[2] / queries[2] / len(tiles) / READ_A_US

    def cost(splits: int) -> float:
        step = tile.queries * tile.keys * (queries[3] + 64) / PAIRS_A_US
        step = max(step, min(blocks * splits, sms) * read)  # the memory may not keep up
        merge = MERGE_US + 2 * splits * result / BYTES_A_US
        return work.lasts(splits, sms) * step + (merge if splits > 1 else 0)

    most = min(MOST_SPLITS, int(tiles.max(initial=1)), MOST_BYTES // max(1, result))
    best, whole = min(range(1, max(1, most) + 1), key=cost), cost(1)
    pays = cost(best) <= min((1 - LEAST_GAIN) * whole, whole - LEAST_US)
    return ListSplits(best, cost(best) / whole) if pays else ListSplits()


def forward(inputs: PieceInputs, tiles: BlockSparseTiles, scale: float, sms: int) -> Result:
    """Return (out [B,T,N,H], lse [B,N,T]) over lists, in splits where that ends sooner.

    Args:
        inputs: bfloat16 or float16, H a multiple of 8; with the pairs that are tested.
        tiles: the lists.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    q, k, v, lists, splits = inputs.q, inputs.k, inputs.v, tiles.tiling.forward, 1
    if not lists.is_traced and knows_operands():
        work = np.asarray(lists.work), tiles.tiles[0]
        splits = splits_of(*work, q.shape, k.shape, sms).splits
    assert inputs.pairs is not None
    made = tiles.forward(inputs.pairs, scale, splits)
    return Result(*(_in_splits if splits > 1 else block_sparse.forward)(q, k, v, made))


def _in_splits(q: Array, k: Array, v: Array, tiles: TilePass) -> Result:
    t, width = q.shape[1], q.shape[3]
    # XLA (jax 0.11.2) would write one result of a call into another of it: split_queries.py.
    outs, lses = jax.lax.optimization_barrier(_launched(q, k, v, tiles))
    out, lse = merged(outs[:, :, :t, :, :width], lses[:, :, :t])
    return Result(out.astype(q.dtype), lse)


def _launched(q: Array, k: Array, v: Array, tiles: TilePass) -> list[Array]:
    """Return out and lse of each split."""
    lib, spec, (b, t, n, h) = library(), import_module("cutejax").ArraySpec, q.shape
    launch = fa4_launch.forward_launch(block_sparse.spec_of(q, k, tiles, forward=True))
    lists, rows = block_sparse.on_device(tiles), -(-t // tiles.tile.queries) * tiles.tile.queries
    shapes = (tiles.splits, b, rows, n, wide(h)), (tiles.splits, b, rows, n)
    numbers = block_sparse.one_by_one(*lists, *tiles.read)
    return import_module("cutejax").call(
        run_list_splits,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        launch,
        (q, k, v),
        lists,
        tiles.read,
        in_specs=[lib._QKV_SPEC] * 3 + numbers,
        out_specs=[
            spec(static_dims=(0, 2, 3, 4), assumed_align=ALIGNED["_F32_SPEC"]),
            spec(static_dims=(0, 2, 3), assumed_align=ALIGNED["_LSE_SPEC"]),
        ],
        vmap_method="sequential",
        name="maxattn_forward_list_splits",
    )
