"""Block-sparse lists of a backward, split over the queries where tiles of keys leave SMs idle.

A thread block takes a tile of keys of one head, against the tiles of queries in its list. Few keys
are fewer thread blocks than a GPU has SMs: three tiles of four heads are 12, for 132 SMs. So every
list is cut into as many splits, each for a thread block of its own: 11 splits of the twelve lists
are 132. The dK and dV of splits are summed, in float32; where query heads share keys, all splits
add to the same sums.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from maxattn.call import Call
from maxattn.devices import SMS
from maxattn.kernels.fa4.block_sparse_lists import TileLists, visits_by_keys
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.split_queries import SUMS, Dims, most_splits
from maxattn.kernels.fa4.tile_sizes import backward_tile
from maxattn.masks.terms import SplitMask, split_mask

LEAST_GAIN, LEAST_TILES = 0.05, 4  # below, a prediction says nothing
MOST_SPLITS = 64  # where thread blocks are fewer than fill the SMs
MOST_WAVES = 4  # of thread blocks, beyond which nothing is split
MOST_PLAYED = 2_000  # thread blocks, of uneven rows, whose end is worked out one by one
ADDS = 1  # what splits that add to the same sums cost, in tiles of keys by queries
SUMS_BYTES = 35e6  # of dK and dV of all splits, which take SUMS to be summed (split_queries.py)
MOST_TILES = 2**22  # in the lists of splits, of which a compiled program holds known ones
UNKNOWN = 1, 2, 4  # what is known on the device alone may leave all tiles, half, or a quarter


class ListedWork(NamedTuple):
    """Say how much a backward over lists has to do.

    Attributes:
        tiles: [rows] of queries that each tile of keys visits.
        lanes: heads of all batch rows: thread blocks of each tile of keys.
    """

    tiles: np.ndarray
    lanes: int

    def lasts(self, splits: int, sms: int) -> float:
        """Return how long it takes in so many splits, in tiles, sums excepted."""
        each = -(-self.tiles // splits) + START
        blocks = len(each) * self.lanes * splits
        if blocks > MOST_PLAYED or each.min() == each.max():
            return max(-(-blocks // sms) * float(each.mean()), float(each.max()))
        free = [0.0] * sms
        for row in each.tolist() * (self.lanes * splits):
            heapq.heapreplace(free, free[0] + row)
        return max(free)


def splits_of(works: Iterable[ListedWork], bytes_each: float, sms: int = SMS) -> int:
    """Choose into how many splits of the queries a backward goes: what ends first on average.

    Args:
        works: that may have to be done, each as likely.
        bytes_each: of dK and dV of a split; 0 where all splits add to the same sums.
        sms: streaming multiprocessors (SMs), each of which runs one thread block at a time.
    """
    works = [work for work in works if work.tiles.size]
    most = max((int(work.tiles.max()) for work in works), default=1)
    blocks = max((len(work.tiles) * work.lanes for work in works), default=1)
    most = min(most, most_splits(blocks, sms, MOST_SPLITS))

    def cost(splits: int) -> float:
        ends = sum(work.lasts(splits, sms) for work in works) / max(1, len(works))
        sums = SUMS * max(1.0, splits * bytes_each / SUMS_BYTES) if bytes_each else ADDS
        return ends + (sums if splits > 1 else 0)

    best, whole = min(range(1, max(1, most) + 1), key=cost), cost(1)
    return best if cost(best) <= min((1 - LEAST_GAIN) * whole, whole - LEAST_TILES) else 1


def may_split(queries: Dims, keys: Dims, sms: int) -> bool:
    """Tell whether tiles of keys are so few that splits may pay, for shapes of q and k."""
    tile = backward_tile(queries[3], queries[1])
    sizes = -(-keys[1] // tile.keys), -(-queries[1] // tile.queries)
    return may_split_tiles(sizes, queries[0] * queries[2], sms)


def may_split_tiles(sizes: tuple[int, int], lanes: int, sms: int) -> bool:
    """Tell the same of rows of tiles.

    Args:
        sizes: rows, and tiles that each visits at most.
        lanes: heads of all batch rows.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    return 0 < sizes[0] * lanes <= MOST_WAVES * sms and sizes[0] * sizes[1] <= MOST_TILES


def splits_for(lists: TileLists, queries: Dims, keys: Dims, sms: int) -> int:
    """Choose for lists of tiles of queries, of shapes [B,T,N,H] of q and [B,S,K,H] of k."""
    if not may_split(queries, keys, sms):
        return 1
    tiles = None if lists.is_traced else np.asarray(lists.work)
    return splits_of(_works(tiles, queries, keys), bytes_of_split(queries, keys), sms)


@lru_cache(maxsize=1024)
def splits_for_call(call: Call, queries: Dims, keys: Dims, sms: int) -> int:
    """Choose for a local call, masked by more than which keys are real."""
    if not may_split(queries, keys, sms):
        return 1
    return splits_of(works_for(call, queries, keys), bytes_of_split(queries, keys), sms)


def works_for(call: Call, queries: Dims, keys: Dims) -> list[ListedWork]:
    """Return what the backward of such a call may have to do; nothing where it gets no lists."""
    found = split_mask(call.mask)
    if not isinstance(found, SplitMask):
        return []
    if found.has_ids:
        return _works(None, queries, keys)
    if call.sharded:
        return []
    tile = backward_tile(queries[3], queries[1])
    return _works(visits_by_keys(found.positions, tile, (queries[1], keys[1])), queries, keys)


def _works(tiles: np.ndarray | None, queries: Dims, keys: Dims) -> list[ListedWork]:
    """Return the works of lists; what each tile of keys visits is None where not known."""
    tile, lanes = backward_tile(queries[3], queries[1]), queries[0] * queries[2]
    if tiles is not None:
        return [ListedWork(tiles, lanes)]
    rows, every = -(-keys[1] // tile.keys), -(-queries[1] // tile.queries)
    return [ListedWork(np.full(rows, -(-every // part)), lanes) for part in UNKNOWN]


def bytes_of_split(queries: Dims, keys: Dims) -> float:
    """Return what dK and dV of a split take; 0 where query heads share keys."""
    size = backward_tile(queries[3], queries[1]).keys
    padded, width = -(-keys[1] // size) * size, -(-keys[3] // 8) * 8
    return 4.0 * keys[0] * padded * keys[2] * width * (queries[2] == keys[2])


# ---- the lists of splits -------------------------------------------------------------------------


def split(lists: TileLists, splits: int) -> TileLists:
    """Cut every list into so many, which stand before the batch rows, if any.

    Each gets its share of the tiles to test and of those to take whole, one more or less of both.

    Args:
        lists: of tiles of queries; one array of tiles for each row, or one for all.
        splits: how many.
    """
    mixed = _parts(lists.mixed_count, lists.mixed, splits)
    # The last parts have one more, of the full tiles the first: no split has one more of both.
    full = (x[::-1] for x in _parts(lists.full_count, lists.full, splits))
    return TileLists(*(_with_batch(x, lists.mixed_count) for x in (*mixed, *full)))


def _parts(count: Any, tiles: Any, splits: int) -> tuple[Any, Any]:
    """Return counts [splits, *B, rows] and tiles [splits, *B, rows, most] of each part."""
    xp: Any = np if isinstance(count, np.ndarray) else jnp
    every = xp.arange(splits, dtype=np.int32).reshape(-1, *(1,) * count.ndim)
    start, end = (n * count[None] // splits for n in (every, every + 1))
    most = max(1, -(-tiles.shape[-1] // splits))
    at = xp.minimum(start[..., None] + xp.arange(most, dtype=np.int32), tiles.shape[-1] - 1)
    each = xp.broadcast_to(tiles, (splits, *count.shape, tiles.shape[-1]))
    return end - start, xp.take_along_axis(each, at, axis=-1)


def _with_batch(x: Any, count: Any) -> Any:
    """Put splits and batch rows on one axis, where there are batch rows."""
    return x if count.ndim == 1 else x.reshape(-1, *x.shape[2:])
