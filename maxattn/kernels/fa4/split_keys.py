"""FlashAttention-4's forward over all pairs, split over the keys where it leaves SMs idle.

A thread block takes a tile of queries of one head, against all keys. Thread blocks run in waves of
as many as there are SMs, and the last wave is as long as any: 37 tiles of 12 heads are 3.4 waves of
132, which last 4, and few queries beside a long cache are fewer tiles than SMs. So the tiles that
fill waves are taken as ever, and those that are left are split over the keys, in the same launch:
33 tiles are 3.0 waves, and the other four, in 8 splits, 0.4 of one. The results of splits are
merged: split_keys_forward.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from maxattn.devices import SMS
from maxattn.kernels.fa4 import row_orders
from maxattn.kernels.fa4.forward_tiles import tile_over_all
from maxattn.kernels.fa4.launch_order import DEALT_START, START
from maxattn.kernels.fa4.split_keys_kernel import SplitGrid
from maxattn.kernels.fa4.split_queries import splits_text
from maxattn.kernels.fa4.tile_sizes import Dims

LEAST_GAIN, LEAST_US = 0.05, 2.0  # below, a prediction says nothing
MOST_SPLITS, MOST_BYTES = 32, 2**28  # of all their results, which stay in memory until the merge
# What the merge costs: two more launches, and what is written and read, in bytes a microsecond.
MERGE_US, BYTES_A_US = 5.0, 3e6
# A tile of queries by keys takes so long in a Hopper GPU's SM: (head dim + 64) x pairs over this,
# in microseconds. The 64 are softmax.
PAIRS_A_US = 1.9e6
READ_A_US = 4e6  # bytes of keys that all SMs read in a microsecond, from a Hopper GPU's memory


class KeySplits(NamedTuple):
    """Name the tiles of queries whose forward is split over the keys.

    Attributes:
        tiles: how many of each head, the last ones.
        splits: of the keys, for each.
    """

    tiles: int
    splits: int

    @property
    def line(self) -> str:
        """Describe it for `explain`."""
        return splits_text(self.tiles, "queries", self.splits, "keys")


class ForwardWork(NamedTuple):
    """Say how much a forward over all pairs has to do.

    Attributes:
        tiles: of queries.
        lanes: thread blocks for each of them: heads of all batch rows.
        steps: tiles of keys, which a thread block goes through.
        step: how long a tile takes, in microseconds.
        read: bytes of keys and values that a tile reads, over the heads that share them.
        result: bytes that the result of a tile has in float32.
        start: what a thread block costs beside its tiles, in tiles, where nothing is split.
        sms: streaming multiprocessors (SMs), each of which runs one thread block at a time.
    """

    tiles: int
    lanes: int
    steps: int
    step: float
    read: float
    result: int
    start: int = START
    sms: int = SMS

    @property
    def unsplit(self) -> float:
        """How long it takes as it is, in microseconds."""
        blocks = self.tiles * self.lanes
        each = self.slowest(blocks, self.tiles)
        return -(-blocks // self.sms) * (self.steps + self.start) * each

    @property
    def evenly(self) -> float:
        """Return how long it takes at least where splits leave no SM idle, in microseconds."""
        blocks = self.tiles * self.lanes
        return blocks * (self.steps + START) * self.step / self.sms + MERGE_US

    def cost(self, tail: KeySplits) -> float:
        """Return how long it takes where these are split, in microseconds, merge included."""
        grid = SplitGrid(self.tiles, self.lanes, *tail)
        longest = -(-self.steps // tail.splits)
        splits = grid.blocks - grid.whole
        long, short = (self.steps + START) * self.step, longest + START
        short *= self.slowest(splits, tail.tiles)
        merge = MERGE_US + 2 * self.bytes_of(tail) / BYTES_A_US
        return end_of((grid.whole, long), (splits, short), self.sms) + merge

    def slowest(self, blocks: int, together: int) -> float:
        """Return how long a tile takes where so many thread blocks run, some on the same keys."""
        return max(self.step, min(blocks, self.sms) * self.read / together / READ_A_US)

    def bytes_of(self, tail: KeySplits) -> int:
        """Return what the results of all splits take."""
        return tail.tiles * self.lanes * tail.splits * self.result


def end_of(first: tuple[int, float], then: tuple[int, float], sms: int) -> float:
    """Return when the last thread block ends, where each SM takes the next as soon as it is free.

    Args:
        first, then: how many thread blocks there are, and how long each takes.
        sms: streaming multiprocessors.
    """
    (count, long), (left, short) = first, then
    waves, busy = divmod(count, sms)
    free = [(waves * long, sms - busy), ((waves + 1) * long, busy)]
    end = (waves + (busy > 0)) * long
    while left > 0:
        start, each = min(x for x in free if x[1])
        free.remove((start, each))
        left, end = left - each, max(end, start + short)
        free.append((start + short, each))
    return end


def split_of(work: ForwardWork) -> KeySplits | None:
    """Choose what is split: what ends first; None where that gains less than the margin."""
    limit = min((1 - LEAST_GAIN) * work.unsplit, work.unsplit - LEAST_US)
    if work.evenly > limit:
        return None
    most = min(work.tiles, 2 * -(-work.sms // work.lanes))
    splits = range(2, min(MOST_SPLITS, work.steps) + 1)
    ways = (KeySplits(n, p) for n in range(1, most + 1) for p in splits)
    ways = (way for way in ways if work.bytes_of(way) <= MOST_BYTES)
    best = min(ways, key=lambda way: (work.cost(way), way), default=None)
    return best if best and work.cost(best) <= limit else None


@lru_cache(maxsize=1024)
def split_for(queries: Dims, keys: Dims, sms: int = SMS) -> KeySplits | None:
    """Choose for the shapes [B,T,N,H] of q and [B,S,K,H] of k, on a Hopper GPU."""
    return None if 0 in queries or 0 in keys else split_of(work_of(queries, keys, sms))


def work_of(queries: Dims, keys: Dims, sms: int = SMS) -> ForwardWork:
    """Return the work of a forward over all pairs; arguments as `split_for`."""
    (batch, t, heads, width), tile = queries, tile_over_all(queries, keys)
    step = tile.queries * tile.keys * (width + 64) / PAIRS_A_US
    persistent = row_orders.of(queries, keys, None, tile, forward=True).persistent
    start = DEALT_START if persistent else START
    read, result = 4 * tile.keys * width * keys[2] / heads, 4 * tile.queries * wide(width)
    sizes = -(-t // tile.queries), batch * heads, -(-keys[1] // tile.keys)
    return ForwardWork(*sizes, step, read, result, start, sms)


def wide(head_dim: int) -> int:
    """Round a head dim up to what a tile of results has."""
    return -(-head_dim // 16) * 16
