"""Where FlashAttention-4 is given block-sparse lists, and how large a backward's tiles are."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.devices import Device
from maxattn.jax_private.versions import FA4_LAUNCHES


def takes_lists(version: str, device: Device) -> bool:
    """Tell whether this fa4-jax can be launched with block-sparse lists on this GPU."""
    return version.startswith(FA4_LAUNCHES) and device.is_a("hopper")


Dims = tuple[int, ...]
"""The shape of an operand: [B,T,N,H] or [B,S,K,H]."""


class Tile(NamedTuple):
    """Say how many queries and keys a tile has."""

    queries: int
    keys: int


class TileCount(NamedTuple):
    """Say how many rows of tiles a head has, and how many tiles they visit."""

    rows: int
    tiles: int


# In short rows of a forward, heads of a row of tiles start after each other; else rows of a head.
# A backward adds to dQ: of 12 heads at a time that is more than a GPU caches.
SHORT_ROW = 16  # of tiles of 128 keys, at most
CACHED = 24 << 20  # bytes of keys and values that rows of heads that start together may read
SHORT_BACKWARD = Tile(64, 128)  # of up to so many queries, and up to head dim 64
WIDE_BACKWARD = Tile(80, 128)  # over all pairs, of head dims 97 to 128
NARROW_COST = 1.15  # of a query in tiles of 64, beside one in those


def whole_tile(head_dim: int, q_len: int | None = None) -> Tile:
    """Return the tile of a backward over all pairs; arguments as for `backward_tile`."""
    narrow = backward_tile(head_dim, q_len)
    if not 96 < head_dim <= 128:
        return narrow
    return narrow if q_len is not None and _pads_less(q_len, narrow) else WIDE_BACKWARD


def _pads_less(q_len: int, narrow: Tile) -> bool:
    rows, wide = (-(-q_len // tile.queries) * tile.queries for tile in (narrow, WIDE_BACKWARD))
    return NARROW_COST * rows < wide


def narrow_tile(head_dim: int, q_len: int) -> Tile | None:
    """Return the tile of a backward over all pairs where it has fewer queries than the library's.

    So few are not split over the queries: what splits cost would be more than they save.
    """
    tile = whole_tile(head_dim, q_len)
    return tile if tile != whole_tile(head_dim) else None


def is_short_backward(head_dim: int, q_len: int) -> bool:
    """Tell whether a backward has so few queries that they are half of the usual tile."""
    return head_dim <= 64 and q_len <= SHORT_BACKWARD.queries


def backward_tile(head_dim: int, q_len: int | None = None) -> Tile:
    """Return the tile of a backward.

    Args:
        head_dim: H.
        q_len: of one device; None for the tile of many queries, one that fa4-jax has settings for.
    """
    if q_len is not None and is_short_backward(head_dim, q_len):
        return SHORT_BACKWARD
    if head_dim <= 64:
        return Tile(128, 128)
    if head_dim <= 128:
        return Tile(64, 128)
    return Tile(64, 96) if head_dim <= 192 else Tile(64, 64)
