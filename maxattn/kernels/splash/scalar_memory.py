"""JAX's splash keeps its lists of tiles in a TPU's scalar memory: which lists fit there.

Beside each tile it lists the next one to fetch, in the narrowest int that holds its column, and
whether it computes, in a byte. The compiler pads rows to 8 and columns to 128.
"""

from __future__ import annotations

import numpy as np

from maxattn.call import Call
from maxattn.masks import Mask
from maxattn.masks.blocks import stretches

MOST_BYTES = 2**20 - 2**14  # a MiB on every TPU, less what a kernel keeps there beside its lists
ROWS, COLUMNS = 8, 128
REMEDY = (
    "set larger flash_block_sizes, context_parallel: ring or ulysses over more devices, or"
    " attention: dot_product with use_memory_efficient_attention: true"
)


def column_type(columns: int) -> type[np.signedinteger]:
    """Return the narrowest int that holds a column of so many."""
    return np.int8 if columns <= 128 else np.int16 if columns <= 2**15 else np.int32


def list_bytes(rows: int, columns: int, item: int) -> int:
    """Count the bytes of lists of tiles whose columns take so many bytes each."""
    return -(-rows // ROWS) * ROWS * -(-columns // COLUMNS) * COLUMNS * (item + 1)


def too_long(found: int) -> str | None:
    """Return the rule that lists of so many bytes break, or None."""
    if found <= MOST_BYTES:
        return None
    return (
        f"its lists of tiles are in scalar memory, which holds {MOST_BYTES} bytes of them, and"
        f" here they take {found}"
    )


def forward_bytes(call: Call, positions: Mask, tile: tuple[int, int]) -> int:
    """Count the bytes of a forward's lists.

    Args:
        call: of one device.
        positions: what its mask says of positions alone.
        tile: queries and keys of it.
    """
    if positions.is_full:
        return 0
    rows, columns = -(-call.q_len // tile[0]), -(-call.kv_len // tile[1])
    item = np.dtype(column_type(columns)).itemsize
    if call.sharded:  # traced positions: the lists name every tile
        return list_bytes(rows, columns, item)
    found = stretches(positions, *tile, call.q_len, call.kv_len)
    visited = np.bincount(found.row, found.end - found.start, minlength=rows)
    if visited.sum() == rows * columns:  # no tile is skipped, and there are no lists
        return 0
    return list_bytes(rows, max(1, int(visited.max())), item)
