"""Masks under which a sequence is equal blocks, each of which attends to itself alone.

Each block is then an example of its own: a kernel computes them as rows of the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from maxattn.masks.algebra import And, Full

if TYPE_CHECKING:
    from maxattn.masks.base import Mask


class OwnBlocks(NamedTuple):
    """The equal blocks of a sequence.

    Args:
        count: how many there are, two or more.
        q_len, kv_len: tokens of each.
        mask: what each of them allows inside of itself.
    """

    count: int
    q_len: int
    kv_len: int
    mask: Mask


@lru_cache(maxsize=1024)
def own_blocks(mask: Mask, q_len: int, kv_len: int) -> OwnBlocks | None:
    """Return the shortest blocks that see themselves alone; None where there are none.

    Args:
        mask: bound; `form()` of one that has arrays.
        q_len, kv_len: of the call.

    >>> from maxattn import masks
    >>> own_blocks(masks.BlockSlidingWindow(4, 1, 0) & masks.Causal(0), 12, 12)
    OwnBlocks(count=3, q_len=4, kv_len=4, mask=Causal(offset=0))
    """
    terms = mask.terms()
    for term in terms:
        q, kv = term.own_block() or (0, 0)
        count = q_len // q if q else 0
        others = [each for each in terms if each is not term]
        if count < 2 or (q_len, kv_len) != (count * q, count * kv):
            continue
        if all(other.repeats(q, kv) for other in others):
            rest = And(tuple(others)).canonical() if others else Full()
            within = own_blocks(rest, q, kv)  # each block may divide again
            if within is None:
                return OwnBlocks(count, q, kv, rest)
            return within._replace(count=count * within.count)
    return None
