"""Choose in which order the rows of tiles of a launch start, from its shapes and lists."""

from __future__ import annotations

import jax
import numpy as np

from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.forward_tiles import persistent_pays
from maxattn.kernels.fa4.launch_order import Order, named_order, order_of
from maxattn.kernels.fa4.tile_sizes import ALL_CACHED, CACHED, SHORT_ROW, Dims, Tile

SIXTEEN_BIT = 2  # bytes of a key's number


def of(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    lists: TileLists | None,
    tile: Tile,
    forward: bool = False,
) -> Order:
    """Choose the order of rows of tiles.

    Args:
        queries, keys: the shapes of q and k.
        lists: of the tiles that are visited; None for all.
        tile: their size.
        forward: whose thread blocks can be persistent; the backward's cannot.
    """
    if lists is None:
        work = np.full(-(-queries[1] // tile.queries), -(-keys[1] // tile.keys))
        pays = forward and persistent_pays(queries[3], float(work.mean()), tile)
        return order_of(work, queries[0] * queries[2], pays)
    known = forward and not isinstance(lists.work, jax.Array)
    if known:
        return of_known(np.asarray(lists.work), queries, keys, tile)
    return order_of(lists.work, queries[0] * queries[2])


def of_known(work: np.ndarray, queries: Dims, keys: Dims, tile: Tile) -> Order:
    """Choose the order of a forward's rows over lists that are known when tracing.

    Args:
        work: [rows], the tiles of each row.
        queries, keys: the shapes of q and k.
        tile: their size.
    """
    mean = float(work.mean())
    pays = persistent_pays(queries[3], mean, tile, listed=True)
    is_short = mean * tile.keys <= SHORT_ROW * 128
    group = cached_lanes(int(work.max()) * tile.keys, queries, keys) if is_short else 0
    return order_of(work, queries[0] * queries[2], pays, group)


def of_named(work: np.ndarray, rows: np.ndarray, queries: Dims, keys: Dims, tile: Tile) -> Order:
    """Choose the order of a forward's rows that an array names.

    Args:
        work: [rows], the tiles of each row, known when tracing: all batch rows share them.
        rows: the array, of `heaviest_first`.
        queries, keys: the shapes of q and k.
        tile: their size.
    """
    pays, group = persistent_pays(queries[3], float(work.mean()), tile, listed=True), 0
    if pays:
        most = min(int(work.max()), SHORT_ROW)  # longer rows start head by head
        group = cached_lanes(most * tile.keys, queries, keys)
    return named_order(work, rows, queries[0] * queries[2], pays, group)


def cached_lanes(tokens: int, queries: Dims, keys: Dims) -> int:
    """Return how many query heads go through their rows before the next ones begin.

    A GPU caches the keys and values that their rows of tiles read. The number is a power of 2,
    since a kernel is compiled for each such number, and below twice the number of all heads, since
    the kernel counts the rows of a group in 32 bits.

    Args:
        tokens: that a row reads.
        queries, keys: the shapes of q and k.
    """
    each = 2 * SIXTEEN_BIT * tokens * keys[3] * keys[2] // queries[2]
    lanes, cached = queries[0] * queries[2], CACHED // max(1, each)
    if lanes * each <= ALL_CACHED:
        cached = 2 * lanes
    return 1 << max(0, min(cached.bit_length() - 1, (lanes - 1).bit_length()))
