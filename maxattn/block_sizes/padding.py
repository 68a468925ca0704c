"""How many tokens a block size adds to a length, and which sizes near it add fewer."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes.sizes import LANES, round_up


class Padding(NamedTuple):
    """Hold a padded length in tokens, and the tokens added as a share of the real length."""

    padded: int
    share: float


def padding(length: int, block: int) -> Padding:
    """Compute what a block size pads: ceil(length / block) * block.

    Args:
        length: real tokens, at least 1.
        block: tokens per block, at least 1.

    Returns:
        The padded length, and (padded - length) / length.
    """
    padded = round_up(length, block)
    return Padding(padded, (padded - length) / length)


def nearest_with_less_padding(
    length: int, block: int, step: int = LANES, most: int | None = None, count: int = 3
) -> tuple[int, ...]:
    """Find the block sizes nearest to one that pad less than it does.

    Args:
        length: real tokens.
        block: the size to better, in tokens.
        step: what sizes must be a multiple of, in tokens; 128 for KV blocks, and for Q blocks in
            training.
        most: the longest size to offer; default twice `block`, and one step at least.
        count: how many to offer.

    Returns:
        Up to `count` sizes, nearest first; none when no size up to `most` pads less.
    """
    now = padding(length, block).padded
    last = min(most or max(2 * block, step), round_up(length, step))
    sizes = range(step, last + 1, step)
    better = [size for size in sizes if padding(length, size).padded < now]
    return tuple(sorted(better, key=lambda size: (abs(size - block), size))[:count])
