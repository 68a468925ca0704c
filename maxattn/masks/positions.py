"""Masks that are functions of the positions of a query and a key."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import jax
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.algebra import Full
from maxattn.masks.base import BIG, Lengths, Mask, Span, Spots, text
from maxattn.masks.tree import mask_type

MOST = BIG // 2  # of a number: int32 holds the sum of a position, an offset and a width


class PositionMask(Mask):
    """Give intervals of key positions for a query at `index + offset`; everything else follows from
    them.
    """

    offset: int | None

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """Give the key positions that a query at a position sees."""
        raise NotImplementedError(type(self).__name__)

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Shift the queries by the offset and give what they see."""
        if self.offset is None:
            rule = "where the queries sit depends on the lengths"
            raise InputError("mask", self, rule, "call bind(q_len, kv_len) first, or give offset=")
        return self.seen(q_pos + self.offset, xp)

    def at(self, spots: Spots) -> Any:
        """Test every key against the intervals of every query."""
        out = spots.xp.zeros((1, 1, 1, 1), dtype=bool)
        for lo, hi in self.spans(spots.q_pos, spots.xp, True):
            inside = spots.xp.ones((1, 1, 1, 1), dtype=bool)
            inside = (
                inside
                if lo is None
                else inside & (spots.kv_pos[None, None, None, :] >= lo[None, None, :, None])
            )
            inside = (
                inside
                if hi is None
                else inside & (spots.kv_pos[None, None, None, :] < hi[None, None, :, None])
            )
            out = out | inside
        return out

    def bound_to(self, lengths: Lengths) -> Mask:
        """Resolve an offset of None so that the last query sits at the last key."""
        if self.offset is not None:
            return self
        if lengths.q_len > lengths.kv_len:
            rule = (
                "without an offset the last query sits at the last key, which needs q_len <= kv_len"
            )
            remedy = "give offset= (offset=0 puts query 0 at key 0)"
            raise InputError(
                "mask", f"{self} with q_len={lengths.q_len}, kv_len={lengths.kv_len}", rule, remedy
            )
        return replace(self, offset=lengths.kv_len - lengths.q_len)  # pyright: ignore[reportArgumentType]


@mask_type
class Causal(PositionMask):
    """Allow a query its own position and all before it: `key <= query`.

    Args:
        offset: position of query 0; None puts the last query at the last key.
    """

    offset: int | None = None

    def __post_init__(self) -> None:
        """Check the offset."""
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See up to oneself."""
        return ((None, pos + 1),)


@mask_type
class LocalWindow(PositionMask):
    """Allow keys near the query: `query - left <= key <= query + right`.

    Args:
        left: keys before the query, 0 or more; None for all.
        right: keys after the query, 0 or more; None for all.
        offset: position of query 0; None puts the last query at the last key.
    """

    left: int | None
    right: int | None
    offset: int | None = None

    def __post_init__(self) -> None:
        """Check the sides and the offset."""
        whole(self, "left", least=0, optional=True)
        whole(self, "right", least=0, optional=True)
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See from `left` before to `right` after."""
        return (
            (
                None if self.left is None else pos - self.left,
                None if self.right is None else pos + self.right + 1,
            ),
        )

    def simplified(self) -> Mask:
        """Be `Full` without sides, and `Causal` when only the past is seen."""
        if self.left is None and self.right is None:
            return Full()
        return Causal(self.offset) if self.left is None and self.right == 0 else self


@mask_type
class BlockCausal(PositionMask):
    """Allow a query its own block and all blocks before it: `key // block <= query // block`.

    Args:
        block: tokens in a block.
        offset: position of query 0; None puts the last query at the last key.
    """

    block: int
    offset: int | None = None

    def __post_init__(self) -> None:
        """Check the block and the offset."""
        whole(self, "block", least=1)
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See to the end of one's block."""
        return ((None, (pos // self.block + 1) * self.block),)

    def simplified(self) -> Mask:
        """Be `Causal` when a block is one token."""
        return Causal(self.offset) if self.block == 1 else self

    def own_period(self) -> int | None:
        """Give the block."""
        return self.block


@mask_type
class BlockSlidingWindow(PositionMask):
    """Allow a query its own block and the `window - 1` blocks before it: `0 <= query // block - key
    // block < window`.

    Args:
        block: tokens in a block (the tokens of a frame, say); any number, and the length need not
            be a multiple.
        window: blocks seen, the query's own included.
        offset: position of query 0; None puts the last query at the last key.
    """

    block: int
    window: int
    offset: int | None = None

    def __post_init__(self) -> None:
        """Check the block, the window and the offset."""
        whole(self, "block", least=1)
        whole(self, "window", least=1)
        whole(self, "offset", least=-MOST, optional=True)
        if self.block * self.window > BIG:
            rule = f"block * window is at most {BIG}"
            raise InputError(
                "BlockSlidingWindow.window",
                self.window,
                rule,
                "use BlockCausal(block) to see all blocks",
            )

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See `window` blocks that end with one's own."""
        end = (pos // self.block + 1) * self.block
        return ((end - self.block * self.window, end),)

    def simplified(self) -> Mask:
        """Be a `LocalWindow` when a block is one token."""
        return LocalWindow(self.window - 1, 0, self.offset) if self.block == 1 else self

    def own_period(self) -> int | None:
        """Give the block."""
        return self.block


@mask_type
class KeyLimit(Mask):
    """Allow the keys before a limit to every query: `key < limit`.

    Args:
        limit: number of keys allowed.
    """

    limit: int

    def __post_init__(self) -> None:
        """Check the limit."""
        whole(self, "limit", least=0, most=BIG)

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """See up to the limit."""
        return ((None, self.limit),)

    def at(self, spots: Spots) -> Any:
        """Compare keys alone."""
        return (spots.kv_pos < self.limit)[None, None, None, :]


def whole(mask: Mask, name: str, least: int, optional: bool = False, most: int = MOST) -> None:
    """Check that a field is a whole number in range, and keep it as an int.

    Args:
        mask: the mask that is being made.
        name: the field.
        least: smallest value.
        optional: whether None is a value.
        most: largest value, a power of two.

    Raises:
        InputError: it is not.
    """
    value, where = getattr(mask, name), f"{type(mask).__name__}.{name}"
    if value is None and optional:
        return
    number = _int(value)
    none = ", or None" if optional else ""
    if number is None:
        raise InputError(
            where,
            text(value),
            f"a whole number{none}",
            f"give {name} as a Python int, known before tracing",
        )
    if number < least:
        raise InputError(where, value, f"at least {least}{none}", f"give {name} of {least} or more")
    if number > most:
        rule = f"at most 2**{most.bit_length() - 1} = {most}{none}"
        raise InputError(where, value, rule, f"give a smaller {name}")
    object.__setattr__(mask, name, number)


def _int(value: Any) -> int | None:
    try:
        return None if isinstance(value, (bool, np.bool_)) else index(value)
    except (TypeError, jax.errors.JAXTypeError):
        return None
