"""How many tiles block-sparse lists may have."""

from __future__ import annotations

from maxattn.kernels.fa4.forward_tiles import forward_tiles
from maxattn.kernels.fa4.tile_sizes import backward_tile

# Of all that a call has, in the lists or not: a list may name each of them, in 4 bytes.
MOST_TILES = 2**27
# The same of lists that are made on the device for each batch row: full and mixed tiles have an
# index of 4 bytes each, in two arrays, and sorting takes as much again.
MOST_ROW_TILES = 2**25


def fits_lists(head_dim: int, q_len: int, kv_len: int, rows: int = 0) -> bool:
    """Tell whether block-sparse lists have at most so many tiles in either pass as fit memory.

    Args:
        head_dim: H.
        q_len, kv_len: of one device.
        rows: batch rows that have lists of their own, made on the device; 0 where lists are of
            positions alone.
    """
    tiles = *forward_tiles(head_dim, q_len, kv_len, listed=True), backward_tile(head_dim)
    most = MOST_ROW_TILES // rows if rows else MOST_TILES
    return all(-(-q_len // t.queries) * -(-kv_len // t.keys) <= most for t in tiles)
