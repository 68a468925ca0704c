"""JAX's splash keeps its lists of tiles in a TPU's scalar memory: which lists fit there.

Beside each tile it lists the next one to fetch, in the narrowest int that holds its column, and
whether it computes, in a byte. The compiler pads rows to 8 and columns to 128.
"""

from __future__ import annotations

from functools import lru_cache

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
    """Count the bytes of a forward's lists; where they are too many anyway, maybe fewer than that.

    Args:
        call: of one device.
        positions: what its mask says of positions alone.
        tile: queries and keys of it.
    """
    if positions.is_full:
        return 0
    lengths = call.q_len, call.kv_len
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    item = np.dtype(column_type(columns)).itemsize
    if call.sharded:  # traced positions: the lists name every tile
        return list_bytes(rows, columns, item)
    least = list_bytes(rows, 1, item)
    if least > MOST_BYTES and _skips_some(positions, tile, lengths):
        return least
    most = _longest_row(positions, tile, lengths)
    return 0 if most is None else list_bytes(rows, most, item)


@lru_cache(maxsize=256)
def _longest_row(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> int | None:
    """Return the most tiles that a row visits; None where none is skipped: there are no lists."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    found = stretches(mask, *tile, *lengths)
    visited = np.bincount(found.row, found.end - found.start, minlength=rows)
    return None if visited.sum() == rows * columns else max(1, int(visited.max()))


def _skips_some(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Tell whether the first, the middle or the last row of tiles is seen to skip one."""
    q_len, kv_len = lengths
    last = (q_len - 1) // tile[0]
    for row in {0, last // 2, last}:
        change = np.zeros(-(-kv_len // tile[1]) + 1, np.int64)
        queries = np.arange(row * tile[0], min((row + 1) * tile[0], q_len))
        for lo, hi in mask.intervals(queries):
            some, end = lo < np.minimum(hi, kv_len), np.minimum(hi, kv_len)
            np.add.at(change, lo[some] // tile[1], 1)
            np.add.at(change, (end[some] - 1) // tile[1] + 1, -1)
        if not np.cumsum(change)[:-1].all():
            return True
    return False
