"""Where FlashAttention-4 is given block-sparse lists, and how large the tiles are."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from maxattn.devices import Device
from maxattn.jax_private.versions import FA4_LAUNCHES


def takes_lists(version: str, device: Device) -> bool:
    """Tell whether this fa4-jax can be launched with block-sparse lists on this GPU."""
    return version.startswith(FA4_LAUNCHES) and device.is_a("hopper")


def fits_lists(head_dim: int, q_len: int, kv_len: int, rows: int = 0) -> bool:
    """Tell whether block-sparse lists have at most so many tiles in either pass as fit memory.

    Args:
        head_dim: H.
        q_len, kv_len: of one device.
        rows: batch rows that have lists of their own, made on the device; 0 where lists are of
            positions alone.
    """
    tiles = forward_tile(head_dim, lambda tile: tile.queries * tile.keys), backward_tile(head_dim)
    most = MOST_ROW_TILES // rows if rows else MOST_TILES
    return all(-(-q_len // t.queries) * -(-kv_len // t.keys) <= most for t in tiles)


class Tile(NamedTuple):
    """Say how many queries and keys a tile has."""

    queries: int
    keys: int


SMALL, LEAST_GAIN = Tile(128, 128), 0.13
SHORT_ROW = 16  # tiles
# Whether all heads of a row of tiles start after each other, in short rows of a forward; else one
# head's rows do. A backward adds to dQ: of 12 heads at a time that is more than a GPU caches.
ACROSS_SHORT = True
# Of all that a call has, in the lists or not: a list may name each of them, in 4 bytes.
MOST_TILES = 2**27
# The same of lists that are made on the device for each batch row: full and mixed tiles have an
# index of 4 bytes each, in two arrays, and sorting takes as much again.
MOST_ROW_TILES = 2**25


def forward_tile(head_dim: int, visited: Callable[[Tile], int] | None = None) -> Tile:
    """Return the tile of the forward.

    Args:
        head_dim: H.
        visited: counts the pairs in the tiles that a mask does not skip, where that is known: tiles
            of 128 queries fit small blocks and short calls better, and take 14% longer for a pair
            than those of 192.
    """
    if head_dim <= 64:
        large = Tile(192, 128)
        smaller = visited is not None and visited(SMALL) < (1 - LEAST_GAIN) * visited(large)
        return SMALL if smaller else large
    if head_dim <= 96:
        return Tile(192, 144)
    if head_dim <= 128:
        return Tile(128, 128)
    return Tile(128, 112) if head_dim <= 192 else Tile(128, 80)


def persistent_pays(head_dim: int, tiles: float) -> bool:
    """Tell whether the forward gains by persistent thread blocks (tile_schedulers.py).

    What they save is a row's start: up to head dim 64 that is 3 to 35% on an H200. At 128 the loop
    over tiles itself gets slower, by more than that where rows are long. Elsewhere shared memory
    has no room for a tile of results.

    Args:
        head_dim: H.
        tiles: in a row, on average.
    """
    return head_dim <= 64 or (96 < head_dim <= 128 and tiles <= SHORT_ROW)


def whole_tile(head_dim: int) -> Tile:
    """Return the tile of the library's own backward over all pairs."""
    return Tile(80, 128) if 96 < head_dim <= 128 else backward_tile(head_dim)


def backward_tile(head_dim: int) -> Tile:
    """Return the tile of the backward, one that fa4-jax has settings for."""
    if head_dim <= 64:
        return Tile(128, 128)
    if head_dim <= 96:
        return Tile(64, 128)
    if head_dim <= 128:
        return Tile(64, 128)
    return Tile(64, 96) if head_dim <= 192 else Tile(64, 64)
