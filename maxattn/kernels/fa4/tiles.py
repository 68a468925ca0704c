"""Tiles of FlashAttention-4 on a Hopper GPU: which there can be, and how long an SM takes for them.

With W for the head dim as a kernel pads it, an item of a forward takes about

    start + tiles * (loop + queries * keys * (W + 64) * pair)        microseconds of an SM

With few keys the best tile ends with the last key; with many keys it is a large one. A persistent
thread block begins an item while it ends the one before: its start is shorter, its loop is mostly
longer, and its tile of results needs its own shared memory. Measured on an H200; an H100 agrees.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

SHARED_MEMORY = 227 * 1024 - 1024  # bytes that a thread block has on Hopper, but for barriers
SOFTMAX = 64  # channels of a head that take as long as the softmax of a pair
START, QUERY = 0.3, 7.7e-5  # microseconds of an item; for each query and channel of W + SOFTMAX
TAKE = 0.3  # of the next item from the queue
# A pair takes so much longer if fewer warps share a tile's keys.
ROWS_64, ROWS_128 = 1.75, 1.15
SHORTEST, SHORT = 48, 64  # keys of a tile
LONG = 2**14  # keys from which small tiles are not tried: lists of them would get long
# The longest head dim whose persistent thread blocks can go by lists: with a test of pairs beside
# longer ones they run out of registers.
LISTED_HEADS = 160
# A pair of a backward, for each channel of W + SOFTMAX; the start of an item, in steps.
BACKWARD_PAIR, BACKWARD_START = 1.45e-6, 2
NARROW = 1.15  # a query in backward tiles of 64, beside one in tiles of 80


class Tile(NamedTuple):
    """Numbers of queries and keys of a tile."""

    queries: int
    keys: int


class Speed(NamedTuple):
    """Times of the parts of a forward's item, in microseconds of an SM.

    Attributes:
        pair: each channel of the W + SOFTMAX channels of a pair: two products, an exponential.
        loop: each key tile, beside its pairs.
        persistent: `loop` of persistent thread blocks.
        block: the start of a thread block, over that of a persistent one's next item.
    """

    pair: float
    loop: float
    persistent: float
    block: float


SPEEDS = {  # by the longest head dim
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
    """Return how long items of a forward take; `queue`: of persistent thread blocks."""
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
    """Return how long items of a backward take."""
    width = kernel_width(head_dim) + SOFTMAX
    narrow = NARROW if tile.queries == 64 and 64 < head_dim <= 128 else 1.0
    step = tile.queries * tile.keys * width * narrow * BACKWARD_PAIR
    return ItemTime(BACKWARD_START * step, step)


# ---- a forward's tiles ---------------------------------------------------------------------------


def library_tile(head_dim: int) -> Tile:
    """Return the tile that fa4-jax takes for a forward over all pairs."""
    if head_dim <= 96:
        return Tile(192, 128 if head_dim <= 64 else 144)
    if head_dim <= 128:
        return Tile(128, 128)
    return Tile(128, 112 if head_dim <= 192 else 80)


def forward_tiles(head_dim: int, q_len: int, kv_len: int, listed: bool) -> tuple[Tile, ...]:
    """Return the tiles that a forward can take; `listed`: with lists and a test of pairs."""
    found = dict.fromkeys(_candidates(head_dim, q_len, kv_len, listed))
    return tuple(x for x in found if fits(head_dim, x)) or (library_tile(head_dim),)


def _candidates(head_dim: int, q_len: int, kv_len: int, listed: bool) -> Iterator[Tile]:
    all_queries = (64,) if q_len <= 64 else (192, 128) if head_dim <= 96 else (128,)
    for queries in all_queries:
        most = _most_keys(head_dim, queries, listed)
        # The largest tile of keys, if any, that leaves room for a tile of results.
        room = (n for n in range(most, SHORTEST - 1, -16) if fits(head_dim, Tile(queries, n), True))
        sizes = [most, min(most, 128), *list(room)[:1]]
        yield from (Tile(queries, keys) for keys in sizes)
        if kv_len <= LONG:
            for keys in (*sizes, SHORT):
                tiles = max(1, ceil(kv_len / keys))  # of which the last ends with the last key
                yield Tile(queries, max(SHORTEST, ceil(kv_len / (16 * tiles)) * 16))


def _most_keys(head_dim: int, queries: int, listed: bool) -> int:
    """Return the most keys of a tile whose scores and results fit the registers.

    The test of pairs takes registers too.
    """
    if listed and head_dim > 128:
        return 112 if head_dim <= 160 else 96 if head_dim <= 192 else 64
    if 64 < head_dim <= 96:
        return 144 if queries == 192 and not listed else 128
    return 128 if head_dim <= 160 else library_tile(head_dim).keys


def fits(head_dim: int, tile: Tile, queue: bool = False) -> bool:
    """Return whether Q, two stages of K and V, scores and results fit shared memory.

    Args:
        head_dim: H.
        tile: queries and keys at a time.
        queue: whether results have a place of their own; else they take that of Q.
    """
    width = ceil(head_dim / 16) * 16
    # From 65 to 96 scores are stored; shorter and longer heads keep them in registers.
    scores = tile.queries * tile.keys if 64 < head_dim <= 96 else 0
    results = tile.queries * width if queue else 0
    return 2 * (tile.queries * width + 4 * tile.keys * width + scores + results) <= SHARED_MEMORY


def can_queue(head_dim: int, tile: Tile, listed: bool) -> bool:
    """Return whether a forward's thread blocks can be persistent."""
    return fits(head_dim, tile, queue=True) and not (listed and head_dim > LISTED_HEADS)


# ---- a backward's tiles --------------------------------------------------------------------------


def kernel_width(head_dim: int) -> int:
    """Return the head dim that a backward is compiled for.

    Above 128, fa4-jax 0.1 has settings for 192 and 256 alone. A kernel for 192 takes arrays of 160:
    its copies read zeros past their end, and write nothing there.
    """
    return head_dim if head_dim <= 128 else ceil(head_dim / 64) * 64


def sums_width(head_dim: int) -> int:
    """Return how many float32 sums a backward keeps for each query or key."""
    return ceil(kernel_width(head_dim) / 32) * 32


def backward_tile(head_dim: int, q_len: int, listed: bool) -> Tile:
    """Return the tile of a backward; `listed`: with lists and a test of pairs."""
    if head_dim <= 64:
        return Tile(64 if q_len <= 64 else 128, 128)
    if head_dim <= 96 or (head_dim <= 128 and listed):
        return Tile(64, 128)
    if head_dim <= 128:  # 80 queries, unless so few pad much more of them
        wide, narrow = ceil(q_len / 80) * 80, ceil(q_len / 64) * 64
        return Tile(64 if NARROW * narrow < wide else 80, 128)
    return Tile(64, 96) if head_dim <= 192 else Tile(64, 64)
