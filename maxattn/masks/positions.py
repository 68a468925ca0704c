"""Masks of positions: `PositionMask`, and causal, window, block, rectangle and key-limit masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from maxattn.errors import InputError
from maxattn.masks.algebra import Empty, Full
from maxattn.masks.base import Lengths, Mask, Spots
from maxattn.masks.for_kernels import Band
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import BIG, Span
from maxattn.masks.tree import MOST, mask_type, number


class PositionMask(Mask):
    """Allow each query a few intervals of keys; the base class for masks of your own.

    Decorate a subclass with `mask_type`. Its fields are numbers, followed by `offset: int | None =
    None`, the position of query 0 (None puts the last query at the last key). Its method
    `seen(pos, xp)` returns the intervals `(start, end)` of keys that the query at position `pos`
    sees; None is no bound. Every kernel skips the tiles that these intervals leave empty.

    `seen` also runs inside kernels: write it with `+ - * //`, comparisons, `xp.where`, `xp.minimum`
    and `xp.maximum`, and return equally many intervals for every query.

    Optional methods make a mask faster: `own_period` (the length of its blocks, which chunks then
    divide), `most_keys`, `band` (cuDNN and TransformerEngine refuse a mask without a band),
    `own_block` and `repeats` (each block becomes a batch row), and the properties
    `divides_positions` and `leaves_parts_empty`. A subclass that defines `seen` inherits none of
    these methods from a parent mask class.

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
        """Return the intervals of keys that a query at a position sees."""
        raise NotImplementedError(type(self).__name__)

    @property
    def leaves_parts_empty(self) -> bool:
        """Whether skipping chunks saves work; default True, for which chunks are short."""
        return True

    @property
    def divides_positions(self) -> bool:
        """Whether `seen` divides positions; default True, which can make a TPU's tiles smaller."""
        return True

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        if self.offset is None:
            rule = "without an offset the positions of the queries depend on the lengths"
            raise InputError("mask", self, rule, "call bind(q_len, kv_len) first, or give offset=")
        pos = q_pos + self.offset

        def by_query(end: Any) -> Any:
            """Give an end that is a plain number to every query."""
            return pos * 0 + end if isinstance(end, int) else end

        return tuple((by_query(lo), by_query(hi)) for lo, hi in self.seen(pos, xp))

    def bound_to(self, lengths: Lengths) -> Mask:
        if self.offset is not None:
            return self
        if lengths.q_len > lengths.kv_len:
            found = f"{self} with q_len={lengths.q_len}, kv_len={lengths.kv_len}"
            rule = "without an offset the last query sits at the last key, which needs q_len <="
            remedy = "give offset= (offset=0 puts query 0 at key 0)"
            raise InputError("mask", found, f"{rule} kv_len", remedy)
        return replace(self, offset=lengths.kv_len - lengths.q_len)  # pyright: ignore[reportArgumentType]


class _Moving(PositionMask):
    """A mask whose interval ends move with the query, by one key per query."""

    @property
    def divides_positions(self) -> bool:
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()

    def repeats(self, q: int, kv: int) -> bool:
        return q == kv


class _Blocks(PositionMask):
    """A mask whose interval ends jump at the first query of each block of `block` tokens."""

    block: int

    def own_period(self) -> int | None:
        return self.block

    def repeats(self, q: int, kv: int) -> bool:
        return q == kv and q % self.block == 0

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return (RowBlocks(self.block, self.offset or 0),)


@mask_type
class Causal(_Moving):
    """Allow a query the keys up to its own position: `key <= query`.

    Args:
        offset: position of query 0; None puts the last query at the last key.

    >>> from maxattn import masks
    >>> print(masks.Causal().show(4, 4))
    Causal(offset=0)
    4 queries down, 4 keys across
    █ · · ·
    █ █ · ·
    █ █ █ ·
    █ █ █ █
    """

    offset: int | None = number(-MOST, optional=True, default=None)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        return ((None, pos + 1),)

    def band(self) -> Band:
        return Band(None, 0, self.offset or 0)


@mask_type
class LocalWindow(_Moving):
    """Allow a query the keys near it: `query - left <= key <= query + right`.

    Args:
        left, right: number of keys before and after the query, 0 or more; None for all keys.
        offset: position of query 0; None puts the last query at the last key.

    >>> from maxattn import masks
    >>> print(masks.LocalWindow(1, 2).show(5, 5))
    LocalWindow(1, 2, offset=0)
    5 queries down, 5 keys across
    █ █ █ · ·
    █ █ █ █ ·
    · █ █ █ █
    · · █ █ █
    · · · █ █
    """

    left: int | None = number(0, optional=True)
    right: int | None = number(0, optional=True)
    offset: int | None = number(-MOST, optional=True, default=None)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        start = None if self.left is None else pos - self.left
        end = None if self.right is None else pos + self.right + 1
        return ((start, end),)

    def band(self) -> Band:
        return Band(self.left, self.right, self.offset or 0)

    def most_keys(self) -> int | None:
        return None if self.left is None or self.right is None else self.left + self.right + 1

    def simplified(self) -> Mask:
        if self.left is None and self.right is None:
            return Full()
        return Causal(self.offset) if self.left is None and self.right == 0 else self


@mask_type
class BlockCausal(_Blocks):
    """Allow a query its block of tokens and all earlier blocks: `key // block <= query // block`.

    Args:
        block: number of tokens in a block.
        offset: position of query 0; None puts the last query at the last key.

    >>> from maxattn import masks
    >>> print(masks.BlockCausal(2).show(5, 5))
    BlockCausal(2, offset=0)
    5 queries down, 5 keys across
    █ █ · · ·
    █ █ · · ·
    █ █ █ █ ·
    █ █ █ █ ·
    █ █ █ █ █
    """

    block: int = number(1)
    offset: int | None = number(-MOST, optional=True, default=None)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        return ((None, (pos // self.block + 1) * self.block),)

    def simplified(self) -> Mask:
        return Causal(self.offset) if self.block == 1 else self


@mask_type
class BlockSlidingWindow(_Blocks):
    """Allow a query its block of tokens and the `window - 1` blocks before that block.

    The formula is `0 <= query // block - key // block < window`.

    Args:
        block: number of tokens in a block, for example in a frame; the last block may be shorter.
        window: number of blocks that a query sees, including the query's block.
        offset: position of query 0; None puts the last query at the last key.

    >>> from maxattn import masks
    >>> print(masks.BlockSlidingWindow(2, 2).show(6, 6))
    BlockSlidingWindow(2, 2, offset=0)
    6 queries down, 6 keys across
    █ █ · · · ·
    █ █ · · · ·
    █ █ █ █ · ·
    █ █ █ █ · ·
    · · █ █ █ █
    · · █ █ █ █
    """

    block: int = number(1)
    window: int = number(1)
    offset: int | None = number(-MOST, optional=True, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block * self.window > BIG:
            rule, remedy = f"block * window must be at most {BIG}", "use BlockCausal(block) for all"
            raise InputError("BlockSlidingWindow.window", self.window, rule, f"{remedy} blocks")

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        end = (pos // self.block + 1) * self.block
        return ((end - self.block * self.window, end),)

    def simplified(self) -> Mask:
        return LocalWindow(self.window - 1, 0, self.offset) if self.block == 1 else self

    def own_block(self) -> tuple[int, int] | None:
        return (self.block, self.block) if (self.window, self.offset) == (1, 0) else None

    def most_keys(self) -> int | None:
        return self.block * self.window


@mask_type
class KeyLimit(Mask):
    """Allow every query the first `limit` keys: `key < limit`.

    Args:
        limit: number of keys that every query sees.

    >>> from maxattn import masks
    >>> print(masks.KeyLimit(2).show(3, 4))
    KeyLimit(2)
    3 queries down, 4 keys across
    █ █ · ·
    █ █ · ·
    █ █ · ·
    """

    limit: int = number(0, most=BIG)

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        return ((None, self.limit),)

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()

    def at(self, spots: Spots) -> Any:
        return (spots.kv_pos < self.limit)[None, None, None, :]

    @property
    def is_of_keys(self) -> bool:
        return True

    def key_limit(self) -> int:
        return self.limit


@mask_type
class Rectangle(PositionMask):
    """Allow some queries some keys: `q_start <= query < q_stop and kv_start <= key < kv_stop`.

    Join rectangles by `|` to choose which parts of a sequence see which other parts; `mask &
    rectangle` restricts a mask to one part.

    Args:
        q_start, q_stop: the range [q_start, q_stop) of query positions, counted from 0.
        kv_start, kv_stop: the range [kv_start, kv_stop) of key positions, counted from 0.

    Raises:
        InputError: a number is below 0, or a stop is before its start.

    >>> from maxattn import masks
    >>> text_and_picture = masks.Rectangle(0, 4, 0, 6)
    >>> reference = masks.Rectangle(4, 6, 4, 6)  # sees itself alone
    >>> print((text_and_picture | reference).show(6, 6))
    Rectangle(0, 4, 0, 6) | Rectangle(4, 6, 4, 6)
    6 queries down, 6 keys across
    █ █ █ █ █ █
    █ █ █ █ █ █
    █ █ █ █ █ █
    █ █ █ █ █ █
    · · · · █ █
    · · · · █ █
    """

    offset: ClassVar[int] = 0
    q_start: int = number(0)
    q_stop: int = number(0)
    kv_start: int = number(0)
    kv_stop: int = number(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in ("q", "kv"):
            start, stop = getattr(self, f"{axis}_start"), getattr(self, f"{axis}_stop")
            if stop < start:
                rule = f"it must be at least {axis}_start = {start}"
                raise InputError(f"Rectangle.{axis}_stop", stop, rule, f"give {start} or more")

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        stop = xp.where(pos >= self.q_stop, self.kv_start, self.kv_stop)
        return ((pos * 0 + self.kv_start, xp.where(pos < self.q_start, self.kv_start, stop)),)

    def simplified(self) -> Mask:
        none = self.q_start == self.q_stop or self.kv_start == self.kv_stop
        return Empty() if none else self

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return (RowBlocks(BIG, 0, (self.q_start, self.q_stop)),)

    def most_keys(self) -> int:
        return self.kv_stop - self.kv_start

    @property
    def divides_positions(self) -> bool:
        return False
