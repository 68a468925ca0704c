"""The sizes of any tiled kernel: by the rules of splash's, or by those of `tpu_flash`."""

from __future__ import annotations

from maxattn.block_sizes import transposed
from maxattn.block_sizes.adjust import adjust
from maxattn.block_sizes.sizes import BlockSizes, Change, KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target


def sizes_for(
    asked: FlashBlockSizes, call: Call, kernel: KernelKind, target: Target, training: bool
) -> tuple[BlockSizes, tuple[Change, ...]]:
    """Return sizes that a kernel compiles with, and each change that this took.

    Args:
        asked: the config's sizes.
        call: the local call.
        kernel: its name.
        target: the machine.
        training: whether the backward runs too.
    """
    if kernel != "tpu_flash":
        return adjust(asked, call, kernel, target, training)
    if training:
        return transposed.sizes_of(asked, call, target)
    tile, changes = transposed.forward_tile(asked, call, target)
    return BlockSizes(*tile), changes
