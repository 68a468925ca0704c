"""Check that the tile lists of JAX's splash and of `tpu_flash` fit a TPU's scalar memory.

For each tile, splash lists the column of the next tile to fetch, in the narrowest int type, and a
byte: 1 if the step computes. The compiler pads the lists to multiples of 8 rows and 128 columns.
`tpu_flash` lists a block and a mark per step, and with segment ids a mark per tile (two buffers).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from maxattn.block_sizes import FORWARD, BlockSizes, adjust
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.errors import Unsupported
from maxattn.masks import Mask
from maxattn.masks.blocks import stretches
from maxattn.masks.terms import supported_split
from maxattn.target import Target
from maxattn.tuned import tuned_config

MOST_BYTES = 2**20 - 2**14  # 1 MiB on every TPU, less what a kernel keeps there besides its lists
ROWS, COLUMNS = 8, 128
WORD = 4  # bytes
# Larger tiles fit no TPU's VMEM; `adjust` shrinks these if they do not fit.
LARGEST = FlashBlockSizes(block_q=2048, block_kv=2048, block_kv_compute=512)
REMEDY = (
    "set context_parallel: ring or ulysses over more devices, or attention: dot_product with"
    " use_memory_efficient_attention: true"
)


def refuse(call: Call, target: Target) -> Reason | None:
    """Refuse a call of JAX's splash whose lists do not fit even with the largest tiles."""
    rule = _rule(call, _sizes(call, LARGEST, target), target)
    return None if rule is None else Reason("flash", "length", rule, REMEDY)


def fitting(call: Call, config: AttentionConfig, target: Target) -> AttentionConfig:
    """Return the config, with the largest tiles if none are set and the default lists do not fit.

    Raises:
        Unsupported: the config sets tiles whose lists do not fit.
    """
    asked = tuned_config(config, "flash", call, target).flash_block_sizes
    sizes = _sizes(call, asked, target)
    rule = _rule(call, sizes, target)
    if rule is None:
        return config
    if config.flash_block_sizes != FlashBlockSizes():
        raise unsupported((sizes.block_q, sizes.block_kv), rule)
    for training in (True, False):  # training first: its forward has other tiles
        sizes = adjust(LARGEST, call, "flash", target, training)[0]
        if _rule(call, sizes, target) is None:
            break
    return config.replace(flash_block_sizes={key: getattr(sizes, key) for key in FORWARD})


def unsupported(tile: tuple[int, ...], rule: str) -> Unsupported:
    what = f"{tile[0]} queries x {tile[1]} keys"
    return Unsupported("flash_block_sizes", what, rule, f"set larger block sizes, or {REMEDY}")


def _sizes(call: Call, asked: FlashBlockSizes, target: Target) -> BlockSizes:
    """Return the block sizes of a forward that is not differentiated."""
    return adjust(asked, call, "flash", target, training=False)[0]


def _rule(call: Call, sizes: BlockSizes, target: Target) -> str | None:
    """Return the rule that a forward's lists break, or None; interpret mode has no limit."""
    if target.platform != "tpu":
        return None
    return too_long(
        _forward_bytes(call, supported_split(call.mask).positions, (sizes.block_q, sizes.block_kv))
    )


def transposed_rule(call: Call, tile: tuple[int, ...], target: Target) -> str | None:
    """Return the rule that the lists of `tpu_flash`'s forward break with this tile, or None."""
    if target.platform != "tpu":
        return None
    parts = supported_split(call.mask)
    rows, columns = -(-call.q_len // tile[0]), -(-call.kv_len // tile[1])
    item = np.dtype(column_type(columns)).itemsize
    steps = _forward_bytes(call, parts.positions, (tile[0], tile[1])) // (item + 1)
    return too_long(words_bytes(steps, rows * columns if parts.has_ids else 0))


def words_bytes(steps: int, marks: int) -> int:
    """Count the bytes of `tpu_flash`'s lists: two words per step and two per tile with a mark."""
    return 2 * WORD * (steps + marks)


def column_type(columns: int) -> type[np.signedinteger]:
    """Return the narrowest integer type for the indexes of `columns` columns."""
    return np.int8 if columns <= 128 else np.int16 if columns <= 2**15 else np.int32


def list_bytes(rows: int, columns: int, item: int) -> int:
    """Count the bytes of splash's tile lists, in which a column takes `item` bytes."""
    return -(-rows // ROWS) * ROWS * -(-columns // COLUMNS) * COLUMNS * (item + 1)


def too_long(found: int) -> str | None:
    """Return the rule that lists of `found` bytes break, or None."""
    if found <= MOST_BYTES:
        return None
    return (
        f"its lists of tiles must fit scalar memory, which has {MOST_BYTES} bytes for them, and"
        f" this call needs {found} bytes"
    )


def _forward_bytes(call: Call, positions: Mask, tile: tuple[int, int]) -> int:
    """Count the bytes of a forward's lists, which depend on the mask's positions alone."""
    if positions.is_full:
        return 0
    lengths = call.q_len, call.kv_len
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    item = np.dtype(column_type(columns)).itemsize
    if call.sharded:  # with traced positions the lists have every tile
        return list_bytes(rows, columns, item)
    least = list_bytes(rows, 1, item)
    if least > MOST_BYTES and _skips_some(positions, tile, lengths):
        return least  # already too many: counting all would visit millions of queries
    most = _longest_row(positions, tile, lengths)
    return 0 if most is None else list_bytes(rows, most, item)


@lru_cache(maxsize=256)
def _longest_row(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> int | None:
    """Return the most key tiles that a query tile visits; None if no tile is skipped (no lists)."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    found = stretches(mask, *tile, *lengths)
    visited = np.bincount(found.row, found.end - found.start, minlength=rows)
    return None if visited.sum() == rows * columns else max(1, int(visited.max()))


def _skips_some(mask: Mask, tile: tuple[int, int], lengths: tuple[int, int]) -> bool:
    """Check whether the first, the middle or the last query tile skips a key tile."""
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
