"""Masks of positions: causal, windows of tokens and of blocks, rectangles, a limit of the keys."""

from __future__ import annotations

from typing import Any, ClassVar

from maxattn.errors import InputError
from maxattn.masks.algebra import Empty, Full
from maxattn.masks.base import BIG, Mask, Span, Spots
from maxattn.masks.for_kernels import Band
from maxattn.masks.position_mask import MOST, PositionMask, whole
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.tree import mask_type


class _Moving(PositionMask):
    """Intervals whose ends move with the query, and so never jump."""

    @property
    def divides_positions(self) -> bool:
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()

    def repeats(self, q: int, kv: int) -> bool:
        return q == kv


class _Blocks(PositionMask):
    """Intervals whose ends jump where a block of `block` tokens begins."""

    block: int

    def own_period(self) -> int | None:
        return self.block

    def repeats(self, q: int, kv: int) -> bool:
        return q == kv and q % self.block == 0

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return (RowBlocks(self.block, self.offset or 0),)


@mask_type
class Causal(_Moving):
    """Allow a query its own position and all before it: `key <= query`.

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

    offset: int | None = None

    def __post_init__(self) -> None:
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        return ((None, pos + 1),)

    def band(self) -> Band:
        return Band(None, 0, self.offset or 0)


@mask_type
class LocalWindow(_Moving):
    """Allow keys near the query: `query - left <= key <= query + right`.

    Args:
        left: keys before the query, 0 or more; None for all.
        right: keys after the query, 0 or more; None for all.
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

    left: int | None
    right: int | None
    offset: int | None = None

    def __post_init__(self) -> None:
        whole(self, "left", least=0, optional=True)
        whole(self, "right", least=0, optional=True)
        whole(self, "offset", least=-MOST, optional=True)

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
    """Allow a query its own block and all blocks before it: `key // block <= query // block`.

    Args:
        block: tokens in a block.
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

    block: int
    offset: int | None = None

    def __post_init__(self) -> None:
        whole(self, "block", least=1)
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        return ((None, (pos // self.block + 1) * self.block),)

    def simplified(self) -> Mask:
        return Causal(self.offset) if self.block == 1 else self


@mask_type
class BlockSlidingWindow(_Blocks):
    """Allow a query its own block and the `window - 1` blocks before it.

    That is `0 <= query // block - key // block < window`.

    Args:
        block: tokens in a block (the tokens of a frame, say); any number, and the length need not
            be a multiple.
        window: blocks seen, the query's own included.
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

    block: int
    window: int
    offset: int | None = None

    def __post_init__(self) -> None:
        whole(self, "block", least=1)
        whole(self, "window", least=1)
        whole(self, "offset", least=-MOST, optional=True)
        if self.block * self.window > BIG:
            rule, remedy = f"block * window is at most {BIG}", "use BlockCausal(block) to see all"
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
    """Allow the keys before a limit to every query: `key < limit`.

    Args:
        limit: number of keys allowed.

    >>> from maxattn import masks
    >>> print(masks.KeyLimit(2).show(3, 4))
    KeyLimit(2)
    3 queries down, 4 keys across
    █ █ · ·
    █ █ · ·
    █ █ · ·
    """

    limit: int

    def __post_init__(self) -> None:
        whole(self, "limit", least=0, most=BIG)

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
    """Allow the queries from q_start to q_stop the keys from kv_start to kv_stop, stops left out.

    Queries and keys are counted from the first of the call. Rectangles joined by `|` say which
    pieces of a sequence see which, and `&` cuts another mask to a piece.

    Args:
        q_start, q_stop: the first query, and the one after the last.
        kv_start, kv_stop: the first key, and the one after the last.

    Raises:
        InputError: a number is below 0, or a stop before its start.

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
    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    def __post_init__(self) -> None:
        for name in ("q_start", "q_stop", "kv_start", "kv_stop"):
            whole(self, name, least=0)
        for axis in ("q", "kv"):
            start, stop = getattr(self, f"{axis}_start"), getattr(self, f"{axis}_stop")
            if stop < start:
                rule = f"it ends at or after {axis}_start, which is {start}"
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
