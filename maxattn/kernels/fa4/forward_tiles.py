"""Which tile a forward of FlashAttention-4 takes on a Hopper GPU, and which thread blocks persist.

A row of tiles is the work of one thread block: all tiles of keys for one tile of queries. With W
for the head dim as the kernel pads it, to a multiple of 16, a row takes about

    start + tiles * (loop + queries * keys * (W + 64) * pair)        microseconds of an SM

so few keys want a tile that ends where they end, and many a large one. Persistent thread blocks
begin a row while they end the one before: their start is shorter, their loop mostly longer, and a
tile of results needs a place of its own in shared memory. The figures were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from maxattn.devices import SMS
from maxattn.kernels.fa4.tile_sizes import Dims, Tile, TileCount

SHARED_MEMORY = 227 * 1024 - 1024  # bytes that a thread block has on Hopper, but for barriers
SOFTMAX = 64  # entries of a head that take as long as the softmax of a pair
START, QUERY = 0.3, 7.7e-5  # of a row; and for each of its queries and entries of W + SOFTMAX
# A pair takes so much longer where fewer warps share a tile's keys.
ROWS_64, ROWS_128 = 1.75, 1.15
MERGE = 7.0  # of the results of splits
SHORTEST, SHORT = 48, 64  # keys of a tile
LONG = 2**14  # keys from which small tiles are not tried: lists of them would get long
# The longest head dim whose persistent thread blocks can go by lists: with a test of pairs beside
# longer ones they run out of registers.
LISTED_HEADS = 160
IDS_SHARE = 0.25  # of the tiles of all pairs that ids are taken to leave


class Speed(NamedTuple):
    """Say what parts of a row take, in microseconds of an SM.

    Attributes:
        pair: an entry of W + SOFTMAX of a pair: two products and an exponential.
        loop: a tile beside its pairs.
        persistent: the same of persistent thread blocks.
        block: the start of a thread block, over that of a persistent one's next row.
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


def _speed(head_dim: int) -> Speed:
    return next((speed for most, speed in SPEEDS.items() if head_dim <= most), SPEEDS[256])


def library_tile(head_dim: int) -> Tile:
    """Return the tile that fa4-jax takes for a forward over all pairs."""
    if head_dim <= 96:
        return Tile(192, 128 if head_dim <= 64 else 144)
    if head_dim <= 128:
        return Tile(128, 128)
    return Tile(128, 112 if head_dim <= 192 else 80)


def most_keys(head_dim: int, queries: int, listed: bool = False) -> int:
    """Return how many keys a tile can have beside its scores and results, in registers.

    Args:
        head_dim: H.
        queries: of the tile.
        listed: whether pairs of some tiles are tested, which takes registers too.
    """
    if listed and head_dim > 128:
        return 112 if head_dim <= 160 else 96 if head_dim <= 192 else 64
    if 64 < head_dim <= 96:
        return 144 if queries == 192 and not listed else 128
    return 128 if head_dim <= 160 else library_tile(head_dim).keys


def fits(head_dim: int, tile: Tile, persistent: bool = False) -> bool:
    """Tell whether Q, two stages of K and V, and what is kept beside them fit shared memory.

    Args:
        head_dim: H.
        tile: queries and keys at a time.
        persistent: whether results have a place of their own; else they take that of Q.
    """
    width = _width(head_dim)
    # From 65 to 96 scores are stored, where longer and shorter heads keep them in registers.
    scores = tile.queries * tile.keys if 64 < head_dim <= 96 else 0
    results = tile.queries * width if persistent else 0
    entries = tile.queries * width + 4 * tile.keys * width + scores + results
    return 2 * entries <= SHARED_MEMORY


def row_time(head_dim: int, tile: Tile, tiles: float, persistent: bool) -> float:
    """Return how long an SM takes for a row of tiles, in microseconds.

    Args:
        head_dim: H.
        tile: queries and keys at a time.
        tiles: that the row visits.
        persistent: whether the thread block goes on to another row.
    """
    speed, width = _speed(head_dim), _width(head_dim) + SOFTMAX
    start, loop = START + QUERY * tile.queries * width, speed.persistent
    if not persistent:
        start, loop = speed.block * start, speed.loop
    pairs = tile.queries * tile.keys * _slower(head_dim, tile.queries)
    return start + tiles * (loop + pairs * width * speed.pair)


def _slower(head_dim: int, queries: int) -> float:
    if queries == 64:
        return ROWS_64
    return ROWS_128 if queries == 128 and head_dim <= 96 else 1.0


def _width(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def persistent_pays(head_dim: int, tiles: float, tile: Tile, listed: bool = False) -> bool:
    """Tell whether a forward gains by persistent thread blocks (tile_schedulers.py).

    Args:
        head_dim: H.
        tiles: in a row, on average.
        tile: their size.
        listed: whether it goes by lists.
    """
    if not fits(head_dim, tile, persistent=True) or (listed and head_dim > LISTED_HEADS):
        return False
    taken, alone = (row_time(head_dim, tile, tiles, way) for way in (True, False))
    return taken <= alone


def ids_persist(queries: Dims, tile: Tile) -> bool:
    """Tell whether a forward over lists that ids leave has persistent thread blocks.

    Its rows are taken to be short. Where they are not, persistent thread blocks cost most from head
    dim 65 to 96.

    Args:
        queries: the shape [B,T,N,H] of q.
        tile: queries and keys at a time.
    """
    batch, t, heads, head_dim = queries
    if 64 < head_dim <= 96 or -(-t // tile.queries) * batch * heads <= SMS:
        return False
    return persistent_pays(head_dim, 0.0, tile, listed=True)


def forward_tiles(head_dim: int, q_len: int, kv_len: int, listed: bool = False) -> tuple[Tile, ...]:
    """Return the tiles that a forward can take.

    Args:
        head_dim: H.
        q_len, kv_len: of one device.
        listed: whether it goes by lists.
    """
    found = dict.fromkeys(_candidates(head_dim, q_len, kv_len, listed))
    return tuple(tile for tile in found if fits(head_dim, tile)) or (library_tile(head_dim),)


def _candidates(head_dim: int, q_len: int, kv_len: int, listed: bool) -> Iterator[Tile]:
    for queries in _queries(head_dim, q_len):
        most = most_keys(head_dim, queries, listed)
        sizes = [most, min(most, 128), *_persistent_keys(head_dim, queries, most)]
        yield from (Tile(queries, keys) for keys in sizes)
        if kv_len > LONG:
            continue
        for keys in (*sizes, SHORT):
            yield Tile(queries, max(SHORTEST, _evenly(kv_len, keys)))


def _queries(head_dim: int, q_len: int) -> tuple[int, ...]:
    if q_len <= 64:
        return (64,)
    return (192, 128) if head_dim <= 96 else (128,)


def _persistent_keys(head_dim: int, queries: int, most: int) -> list[int]:
    """Return the largest tile of keys, if any, that leaves room for a tile of results."""
    room = (n for n in range(most, SHORTEST - 1, -16) if fits(head_dim, Tile(queries, n), True))
    return list(room)[:1]


def _evenly(kv_len: int, most: int) -> int:
    """Return the keys of a tile where so many tiles of at most that many end with the last key."""
    tiles = max(1, -(-kv_len // most))
    return -(-kv_len // (16 * tiles)) * 16


def forward_tile(
    queries: Dims, kv_len: int, visited: Callable[[Tile], TileCount], has_ids: bool = False
) -> Tile:
    """Return the tile of a forward over lists that takes least time.

    Args:
        queries: the shape [B,T,N,H] of q.
        kv_len: number of keys.
        visited: counts the tiles that a mask does not skip.
        has_ids: whether ids skip others, of which nothing is known.
    """
    batch, t, heads, head_dim = queries

    def time(tile: Tile) -> float:
        rows, tiles = visited(tile)
        mean = tiles / max(1, rows)
        if has_ids:
            mean, persistent = IDS_SHARE * mean, ids_persist(queries, tile)
        else:
            persistent = persistent_pays(head_dim, mean, tile, listed=True)
        waves = max(1.0, rows * batch * heads / SMS)
        return waves * row_time(head_dim, tile, mean, persistent)

    return min(forward_tiles(head_dim, t, kv_len, listed=True), key=time)


@lru_cache(maxsize=4096)
def tile_over_all(queries: Dims, keys: Dims) -> Tile:
    """Return the tile of a forward over all pairs, for shapes [B,T,N,H] of q and [B,S,K,H] of k.

    Its rows are as long as each other, so they run in whole waves, or the last ones are split over
    the keys (split_keys.py).
    """
    (batch, t, heads, head_dim), s = queries, keys[1]

    def time(tile: Tile) -> float:
        rows, tiles = -(-t // tile.queries), -(-s // tile.keys)
        persistent = persistent_pays(head_dim, tiles, tile)
        row, waves = row_time(head_dim, tile, tiles, persistent), rows * batch * heads / SMS
        return min(ceil(waves) * row, waves * row + MERGE)

    return min(forward_tiles(head_dim, t, s), key=time)
