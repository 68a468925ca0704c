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
    smallest = min((x.tile for x in forward_tiles(head_dim)), key=lambda t: t.queries * t.keys)
    tiles = smallest, backward_tile(head_dim)
    most = MOST_ROW_TILES // rows if rows else MOST_TILES
    return all(-(-q_len // t.queries) * -(-kv_len // t.keys) <= most for t in tiles)


class Tile(NamedTuple):
    """Say how many queries and keys a tile has."""

    queries: int
    keys: int


class TileCount(NamedTuple):
    """Say how many rows of tiles a head has, and how many tiles they visit."""

    rows: int
    tiles: int


class ForwardTile(NamedTuple):
    """Say what a tile of the forward costs, beside the first one of its head dim.

    Attributes:
        tile: queries and keys at a time.
        pair: time of a pair.
        start: what a row of tiles takes beside its tiles, in pairs of the first tile.
    """

    tile: Tile
    pair: float = 1.0
    start: float = 0.0

    def cost(self, visited: TileCount) -> float:
        """Return the time of a head."""
        pairs = visited.tiles * self.tile.queries * self.tile.keys
        return self.pair * pairs + self.start * visited.rows


SMALL = Tile(128, 128)
SHORT_ROW, FEW_TILES = 16, 4
PERSISTENT_HEADS = 160  # the longest head dim that leaves room for a tile of results
# Whether all heads of a row of tiles start after each other, in short rows of a forward; else one
# head's rows do. A backward adds to dQ: of 12 heads at a time that is more than a GPU caches.
ACROSS_SHORT = True
# Of all that a call has, in the lists or not: a list may name each of them, in 4 bytes.
MOST_TILES = 2**27
# The same of lists that are made on the device for each batch row: full and mixed tiles have an
# index of 4 bytes each, in two arrays, and sorting takes as much again.
MOST_ROW_TILES = 2**25


def forward_tiles(head_dim: int) -> tuple[ForwardTile, ...]:
    """Return the tiles that a forward can take, the usual one first.

    Up to head dim 96 smaller tiles fit small blocks and short calls better, and take longer for a
    pair. From 65 on the larger ones leave no room for a tile of results, and their thread blocks
    are not persistent: a row of theirs starts late.
    """
    if head_dim <= 64:
        return ForwardTile(Tile(192, 128)), ForwardTile(SMALL, pair=1.15)
    if head_dim <= 96:
        return ForwardTile(Tile(192, 144), start=75e3), ForwardTile(SMALL, pair=1.25, start=20e3)
    if head_dim <= 128:
        return (ForwardTile(SMALL),)
    return (ForwardTile(Tile(128, 112) if head_dim <= 192 else Tile(128, 80)),)


def forward_tile(head_dim: int, visited: Callable[[Tile], TileCount] | None = None) -> Tile:
    """Return the tile of the forward that takes least time.

    Args:
        head_dim: H.
        visited: counts the tiles that a mask does not skip, where that is known.
    """
    usual, *others = forward_tiles(head_dim)
    if visited is None or not others:
        return usual.tile
    return min((usual, *others), key=lambda x: x.cost(visited(x.tile))).tile


def persistent_pays(head_dim: int, tiles: float, tile: Tile) -> bool:
    """Tell whether the forward gains by persistent thread blocks (tile_schedulers.py).

    What they save is a row's start. From head dim 97 on the loop over tiles itself gets slower, by
    more than that where rows are long. Elsewhere shared memory has no room for a tile of results.

    Args:
        head_dim: H.
        tiles: in a row, on average.
        tile: their size.
    """
    if head_dim <= 96:
        return head_dim <= 64 or tile == SMALL
    most = SHORT_ROW if head_dim <= 128 else FEW_TILES
    return head_dim <= PERSISTENT_HEADS and tiles <= most


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
