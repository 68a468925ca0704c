"""Calls and tile sizes for which a TPU's scalar memory holds the lists of JAX's splash."""

from __future__ import annotations

from maxattn.block_sizes import BlockSizes, adjust
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.errors import Unsupported
from maxattn.kernels.splash import scalar_memory
from maxattn.masks.terms import SplitMask, split_mask
from maxattn.target import Target
from maxattn.tuned import tuned_config

# Larger ones fit VMEM on no chip; what a chip cannot hold, the rules of block sizes make smaller.
LARGEST = FlashBlockSizes(block_q=2048, block_kv=2048, block_kv_compute=512)


def refuse(call: Call, target: Target) -> Reason | None:
    """Refuse a call whose lists do not fit with the largest tiles either."""
    rule = _rule(call, _sizes(call, LARGEST, target), target)
    return None if rule is None else Reason("flash", "length", rule, scalar_memory.REMEDY)


def fitting(call: Call, config: AttentionConfig, target: Target) -> AttentionConfig:
    """Return the config, with the largest tiles where none was asked for and others do not fit.

    Raises:
        Unsupported: the tiles that the config asks for are too many.
    """
    asked = tuned_config(config, "flash", call, target).flash_block_sizes
    sizes = _sizes(call, asked, target)
    rule = _rule(call, sizes, target)
    if rule is None:
        return config
    if config.flash_block_sizes == FlashBlockSizes():
        return config.replace(flash_block_sizes=_largest(call, target))
    tile = f"{sizes.block_q} queries x {sizes.block_kv} keys"
    raise Unsupported("flash_block_sizes", tile, rule, scalar_memory.REMEDY)


def _largest(call: Call, target: Target) -> FlashBlockSizes:
    """Return the largest tiles, of a backward too where its forward's lists fit."""
    for training in (True, False):
        sizes = adjust(LARGEST, call, "flash", target, training)[0]
        if _rule(call, sizes, target) is None:
            break
    return FlashBlockSizes(
        block_q=sizes.block_q,
        block_kv=sizes.block_kv,
        block_kv_compute=sizes.block_kv_compute,
    )


def _sizes(call: Call, asked: FlashBlockSizes, target: Target) -> BlockSizes:
    """Return the sizes of a forward that is not differentiated."""
    return adjust(asked, call, "flash", target, training=False)[0]


def _rule(call: Call, sizes: BlockSizes, target: Target) -> str | None:
    """Return the rule that a forward breaks; interpret mode has no scalar memory."""
    if target.platform != "tpu":
        return None
    parts = split_mask(call.mask)
    assert isinstance(parts, SplitMask), parts  # refused before
    tile = sizes.block_q, sizes.block_kv
    return scalar_memory.too_long(scalar_memory.forward_bytes(call, parts.positions, tile))
