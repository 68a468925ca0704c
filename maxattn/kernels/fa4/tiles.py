"""Tiles of FlashAttention-4 on a Hopper GPU: the candidates, and an SM's time for each of them.

If W is the head dim, padded for the kernel, an SM takes for an item of a forward about

    start + tiles * (loop + queries * keys * (W + 64) * pair)        microseconds

With few keys the best tile pads the last key tile least; with many keys it is a large tile. A
persistent thread block begins an item while it ends the previous one: the start is shorter, the
loop mostly longer, and outputs need their own shared memory.

Constants without another file were fitted to docs/measured/h200-forward-tiles-2026-11-25.json. Of
its 128 calls without a mask, the tile with the smallest estimate takes 1.009 of the fastest tile's
time in the mean, and 1.22 at most; test_launch.py computes that from any file of this form.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

SHARED_MEMORY = 227 * 1024 - 1024  # bytes of a thread block on Hopper, less 1 KiB for barriers
SOFTMAX = 64  # the softmax of a pair takes as long as this many channels
START, QUERY = 0.3, 7.7e-5  # microseconds per item, and per query and channel of W + SOFTMAX
TAKE = 0.3  # microseconds to take the next item from the queue
# Factors on a pair's time in tiles of 64 and of 128 queries, in which fewer warps share the keys.
ROWS_64, ROWS_128 = 1.75, 1.15
SHORTEST, SHORT = 48, 64  # keys in the smallest tile, and in a small one
LONG = 2**14  # with more keys, small tiles are not tried, since their lists would be long
# The largest head dim with which persistent thread blocks can read lists: with larger ones the test
# of pairs leaves too few registers (34 causal rows of 1,280 tokens and head dim 192: 1.3 times as
# long).
LISTED_HEADS = 160
# A backward: microseconds per pair and channel of W + SOFTMAX; the start of an item, in steps. They
# only compare cuts of one problem: an estimate is 0.4 to 1.5 of the time, by head dim, of 488 rows
# of "flash" in h100-grid-* and h200-grid-*. `python benchmarks/grid.py` measures such rows.
BACKWARD_PAIR, BACKWARD_START = 1.45e-6, 2
# A backward's time per query in tiles of 64 queries, relative to tiles of 80: the 34 rows of
# h100-few-queries-2026-11-25.json have 1.10 (1.06 to 1.13), and tiles of 64 must gain more.
NARROW = 1.15


class Tile(NamedTuple):
    """Numbers of queries and keys in a tile."""

    queries: int
    keys: int


class Speed(NamedTuple):
    """Times of the parts of a forward's item, in microseconds of an SM."""

    pair: float  # time per (query, key) pair and channel of W + SOFTMAX
    loop: float  # time per key tile, beside that of its pairs
    persistent: float  # `loop` in a persistent thread block
    block: float  # factor on the start of an item that has its own thread block


SPEEDS = {  # by the largest head dim of each
    64: Speed(0.5e-6, loop=0.16, persistent=0.11, block=1.65),
    96: Speed(0.45e-6, loop=0.22, persistent=0.25, block=1.5),
    128: Speed(0.45e-6, loop=0.2, persistent=0.28, block=1.65),
    160: Speed(0.4e-6, loop=0.1, persistent=0.2, block=1.8),
    192: Speed(0.3e-6, loop=0.65, persistent=0.5, block=1.8),
    256: Speed(0.4e-6, loop=0.24, persistent=0.35, block=1.8),
}


class ItemTime(NamedTuple):
    """Time of an item in microseconds: start + steps * step."""

    start: float
    step: float


def forward_time(head_dim: int, tile: Tile, queue: bool) -> ItemTime:
    """Return the time of a forward's items; `queue` is True if thread blocks are persistent."""
    speed = next((s for most, s in SPEEDS.items() if head_dim <= most), SPEEDS[256])
    width = ceil(head_dim / 16) * 16 + SOFTMAX
    start = START + QUERY * tile.queries * width
    slower = ROWS_64 if tile.queries == 64 else 1.0
    if tile.queries == 128 and head_dim <= 96:
        slower = ROWS_128
    pairs = tile.queries * tile.keys * slower * width * speed.pair
    if queue:
        return ItemTime(start + TAKE, speed.persistent + pairs)
    return ItemTime(speed.block * start, speed.loop + pairs)


def backward_time(head_dim: int, tile: Tile) -> ItemTime:
    """Return the time of a backward's items."""
    width = kernel_width(head_dim) + SOFTMAX
    narrow = NARROW if tile.queries == 64 and 64 < head_dim <= 128 else 1.0
    step = tile.queries * tile.keys * width * narrow * BACKWARD_PAIR
    return ItemTime(BACKWARD_START * step, step)


# ---- a forward's tiles ---------------------------------------------------------------------------


def library_tile(head_dim: int) -> Tile:
    """Return the tile that fa4-jax uses for a forward without a mask."""
    if head_dim <= 96:
        return Tile(192, 128 if head_dim <= 64 else 144)
    if head_dim <= 128:
        return Tile(128, 128)
    return Tile(128, 112 if head_dim <= 192 else 80)


def forward_tiles(head_dim: int, q_len: int, kv_len: int, listed: bool) -> tuple[Tile, ...]:
    """Return a forward's candidate tiles; `listed` is True if it reads lists and tests pairs."""
    found = dict.fromkeys(_candidates(head_dim, q_len, kv_len, listed))
    return tuple(x for x in found if fits(head_dim, x)) or (library_tile(head_dim),)


def _candidates(head_dim: int, q_len: int, kv_len: int, listed: bool) -> Iterator[Tile]:
    all_queries = (64,) if q_len <= 64 else (192, 128) if head_dim <= 96 else (128,)
    for queries in all_queries:
        most = _most_keys(head_dim, queries, listed)
        # The most keys, if any, that leave shared memory for a tile of outputs.
        room = (n for n in range(most, SHORTEST - 1, -16) if fits(head_dim, Tile(queries, n), True))
        sizes = [most, min(most, 128), *list(room)[:1]]
        yield from (Tile(queries, keys) for keys in sizes)
        if kv_len <= LONG:
            for keys in (*sizes, SHORT):
                tiles = max(1, ceil(kv_len / keys))  # the last one then has little padding
                yield Tile(queries, max(SHORTEST, ceil(kv_len / (16 * tiles)) * 16))


def _most_keys(head_dim: int, queries: int, listed: bool) -> int:
    """Return the most keys whose scores, outputs and test of pairs fit the registers."""
    if listed and head_dim > 128:
        return 112 if head_dim <= 160 else 96 if head_dim <= 192 else 64
    if 64 < head_dim <= 96:
        return 144 if queries == 192 and not listed else 128
    return 128 if head_dim <= 160 else library_tile(head_dim).keys


def fits(head_dim: int, tile: Tile, queue: bool = False) -> bool:
    """Return whether Q, two stages of K and V, scores and outputs fit shared memory.

    Args:
        head_dim: H.
        tile: numbers of queries and keys in a tile.
        queue: whether outputs need their own shared memory; else they overwrite Q.
    """
    width = ceil(head_dim / 16) * 16
    # Head dims from 65 to 96 store the scores; other head dims keep them in registers.
    scores = tile.queries * tile.keys if 64 < head_dim <= 96 else 0
    results = tile.queries * width if queue else 0
    return 2 * (tile.queries * width + 4 * tile.keys * width + scores + results) <= SHARED_MEMORY


def can_queue(head_dim: int, tile: Tile, listed: bool) -> bool:
    """Return whether a forward's thread blocks can be persistent."""
    return fits(head_dim, tile, queue=True) and not (listed and head_dim > LISTED_HEADS)


# ---- a backward's tiles --------------------------------------------------------------------------


def kernel_width(head_dim: int) -> int:
    """Return the head dim that a backward is compiled for.

    Above 128, fa4-jax 0.1 has settings only for 192 and 256. A kernel for 192 also takes arrays of
    head dim 160: its copies read zeros past channel 160, and write nothing there.
    """
    return head_dim if head_dim <= 128 else ceil(head_dim / 64) * 64


def sums_width(head_dim: int) -> int:
    """Return the number of channels in a backward's float32 sums per query or key."""
    return ceil(kernel_width(head_dim) / 32) * 32


def backward_tile(head_dim: int, q_len: int, listed: bool) -> Tile:
    """Return a backward's tile; `listed` is True if it reads lists and tests pairs."""
    if head_dim <= 64:
        return Tile(64 if q_len <= 64 else 128, 128)
    if head_dim <= 96 or (head_dim <= 128 and listed):
        return Tile(64, 128)
    if head_dim <= 128:  # 80 queries, unless tiles of 80 pad many more queries than tiles of 64
        wide, narrow = ceil(q_len / 80) * 80, ceil(q_len / 64) * 64
        return Tile(64 if NARROW * narrow < wide else 80, 128)
    return Tile(64, 96) if head_dim <= 192 else Tile(64, 64)
