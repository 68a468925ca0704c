"""The base of masks of positions: what a new mask derives from, and the check of its numbers."""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import jax
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import BIG, Lengths, Mask, Span, Spots, text

MOST = BIG // 2  # of a number: int32 holds the sum of a position, an offset and a width


class PositionMask(Mask):
    """Intervals of key positions for a query at `index + offset`: the base of a new mask.

    A mask of positions is one class, decorated with `mask_type`: its numbers, then
    `offset: int | None = None`, and `seen`. Every kernel then skips what it leaves empty. `seen` is
    also evaluated inside of kernels: write it with `+ - * //`, comparisons, `xp.where`,
    `xp.minimum` and `xp.maximum`, and with as many intervals for every query.

    What else it may define makes it cheaper, not right: the methods `own_period` (the length of its
    blocks, which chunks are then divisors of), `most_keys` and `band`, without which cuDNN and
    TransformerEngine refuse it, `own_block` and `repeats` (blocks are then rows of the batch); and
    the properties `divides_positions` and `leaves_parts_empty`. A mask that derives from another
    and sees other keys has none of the other's answers.

    >>> from maxattn import masks
    >>> @masks.mask_type
    ... class Dilated(masks.PositionMask):
    ...     step: int
    ...     offset: int | None = None
    ...
    ...     def seen(self, pos, xp):
    ...         return tuple((pos - n * self.step, pos - n * self.step + 1) for n in range(3))
    >>> print(Dilated(2).show(6, 6))
    Dilated(2, offset=0)
    6 queries down, 6 keys across
    █ · · · · ·
    · █ · · · ·
    █ · █ · · ·
    · █ · █ · ·
    █ · █ · █ ·
    · █ · █ · █
    """

    offset: int | None

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """Give the key positions that a query at a position sees."""
        raise NotImplementedError(type(self).__name__)

    @property
    def leaves_parts_empty(self) -> bool:
        """Whether it forbids whole stretches of pairs. Taken as true, so that chunks are short."""
        return True

    @property
    def divides_positions(self) -> bool:
        """Whether its test divides positions. Taken as true, so that a kernel's tiles fit."""
        return True

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Shift the queries by the offset and give what they see."""
        if self.offset is None:
            rule = "where the queries sit depends on the lengths"
            raise InputError("mask", self, rule, "call bind(q_len, kv_len) first, or give offset=")
        return self.seen(q_pos + self.offset, xp)

    def at(self, spots: Spots) -> Any:
        """Test every key against the intervals of every query."""
        out = spots.xp.zeros((1, 1, 1, 1), dtype=bool)
        # [1, 1, 1, s] against [1, 1, t, 1]
        keys = spots.kv_pos[None, None, None, :]
        for lo, hi in self.spans(spots.q_pos, spots.xp, True):
            inside = spots.xp.ones((1, 1, 1, 1), dtype=bool)
            inside = inside if lo is None else inside & (keys >= lo[None, None, :, None])
            inside = inside if hi is None else inside & (keys < hi[None, None, :, None])
            out = out | inside
        return out

    def bound_to(self, lengths: Lengths) -> Mask:
        """Resolve an offset of None so that the last query sits at the last key."""
        if self.offset is not None:
            return self
        if lengths.q_len > lengths.kv_len:
            found = f"{self} with q_len={lengths.q_len}, kv_len={lengths.kv_len}"
            rule = "without an offset the last query sits at the last key, which needs q_len <="
            remedy = "give offset= (offset=0 puts query 0 at key 0)"
            raise InputError("mask", found, f"{rule} kv_len", remedy)
        return replace(self, offset=lengths.kv_len - lengths.q_len)  # pyright: ignore[reportArgumentType]


def whole(mask: Mask, name: str, least: int, optional: bool = False, most: int = MOST) -> None:
    """Check that a field is a whole number in range, and keep it as an int.

    Args:
        mask: the mask that is being made.
        name: the field.
        least: smallest value.
        optional: whether None is a value.
        most: largest value, a power of two.
    """
    value: Any = getattr(mask, name)
    where = f"{type(mask).__name__}.{name}"
    if value is None and optional:
        return
    none = ", or None" if optional else ""
    try:
        number = None if value is None or isinstance(value, (bool, np.bool_)) else index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = None
    if number is None:
        remedy = f"give {name} as a Python int, known before tracing"
        raise InputError(where, text(value), f"a whole number{none}", remedy)
    if number < least:
        raise InputError(where, value, f"at least {least}{none}", f"give {name} of {least} or more")
    if number > most:
        rule = f"at most 2**{most.bit_length() - 1} = {most}{none}"
        raise InputError(where, value, rule, f"give a smaller {name}")
    object.__setattr__(mask, name, number)
