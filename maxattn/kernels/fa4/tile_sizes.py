"""Where FlashAttention-4 is given block-sparse lists, and how large a backward's tiles are."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.call import Call
from maxattn.devices import Device
from maxattn.jax_private.versions import FA4_LAUNCHES


def takes_lists(version: str, device: Device) -> bool:
    """Tell whether this fa4-jax can be launched with block-sparse lists on this GPU."""
    return version.startswith(FA4_LAUNCHES) and device.is_a("hopper")


Dims = tuple[int, ...]
"""The shape of an operand: [B,T,N,H] or [B,S,K,H]."""


def shapes_of(call: Call) -> tuple[Dims, Dims]:
    """Return the shapes of q and k as the library gets them, head dims padded."""
    width = -(-call.head_dim // 8) * 8
    queries = call.batch, call.q_len, call.heads, width
    return queries, (call.batch, call.kv_len, call.kv_heads, width)


class Tile(NamedTuple):
    """Say how many queries and keys a tile has."""

    queries: int
    keys: int


class TileCount(NamedTuple):
    """Say how many rows of tiles a head has, and how many tiles they visit."""

    rows: int
    tiles: int


def kernel_width(head_dim: int) -> int:
    """Return the head dim that a backward is compiled for on Hopper GPUs.

    fa4-jax 0.1.0 has settings for 192 and 256 from 128 on, and fails at 160. A kernel for 192 takes
    arrays of 160: its copies put zeros where these have ended, and write nothing there.
    """
    return head_dim if head_dim <= 128 else -(-head_dim // 64) * 64


def sums_width(head_dim: int) -> int:
    """Return how many float32 sums a backward keeps for each row."""
    return -(-kernel_width(head_dim) // 32) * 32


SHORT_ROW = 16  # of tiles of 128 keys, at most: such rows of a forward start beside other heads'
# Of so many heads a GPU caches what their rows read at a time: bytes of keys and values. A backward
# has no such groups: it adds to dQ, and of 12 heads at a time that is more than a GPU caches.
CACHED = 24 << 20
ALL_CACHED = 2 * CACHED  # of all heads: so few need no groups, whose last rows leave SMs idle
SHORT_BACKWARD = Tile(64, 128)  # of up to so many queries, and up to head dim 64
WIDE_BACKWARD = Tile(80, 128)  # over all pairs, of head dims 97 to 128
NARROW_COST = 1.15  # of a query in tiles of 64, beside one in those


def whole_tile(head_dim: int, q_len: int | None = None) -> Tile:
    """Return the tile of a backward over all pairs; arguments as for `backward_tile`."""
    tile = backward_tile(head_dim, q_len)
    if not 96 < head_dim <= 128:
        return tile
    return tile if q_len is not None and _costs_less(tile, q_len) else WIDE_BACKWARD


def _costs_less(tile: Tile, q_len: int) -> bool:
    """Tell whether tiles of fewer queries than the wide one's pad so much less that they pay."""
    rows, wide = (-(-q_len // x.queries) * x.queries for x in (tile, WIDE_BACKWARD))
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
