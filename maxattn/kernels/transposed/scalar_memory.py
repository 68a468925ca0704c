"""Calls and tiles whose lists a TPU's scalar memory holds, of the kernels of `tpu_flash`.

Positions take a block and a mark a step, segment ids a mark a tile, in two buffers.
"""

from __future__ import annotations

import numpy as np

from maxattn.call import Call
from maxattn.errors import Unsupported
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.transposed.steps import Steps
from maxattn.masks.terms import SplitMask, split_mask
from maxattn.target import Target

WORD = 4  # bytes


def rule_of(call: Call, tile: tuple[int, ...], target: Target) -> str | None:
    """Return the rule that the lists of a call break, or None; interpret mode has no such memory.

    Args:
        call: of one device.
        tile: of the forward.
        target: the machine.
    """
    if target.platform != "tpu":
        return None
    parts = split_mask(call.mask)
    assert isinstance(parts, SplitMask), parts  # refused before
    rows, columns = -(-call.q_len // tile[0]), -(-call.kv_len // tile[1])
    item = np.dtype(scalar_memory.column_type(columns)).itemsize
    steps = scalar_memory.forward_bytes(call, parts.positions, (tile[0], tile[1])) // (item + 1)
    marks = rows * columns if parts.has_ids else 0
    return scalar_memory.too_long(2 * WORD * (steps + marks))


def check_backward(steps: Steps | None, marks: int, blocks: tuple[int, ...]) -> None:
    """Refuse a backward whose lists do not fit.

    Args:
        steps: of its grid, where they are listed.
        marks: of tiles, that segment ids give.
        blocks: of a tile.

    Raises:
        Unsupported: naming the tile.
    """
    listed = 0 if steps is None else steps.block.shape[0]
    rule = scalar_memory.too_long(2 * WORD * (listed + marks))
    if rule is not None:
        what = f"{blocks[0]} queries x {blocks[1]} keys"
        raise Unsupported("flash_block_sizes", what, rule, scalar_memory.REMEDY)
