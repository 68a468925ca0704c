"""Masks of positions: causal, windows of tokens and of blocks, and a limit of the keys."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.algebra import Full
from maxattn.masks.base import BIG, Mask, Span, Spots
from maxattn.masks.for_kernels import Band
from maxattn.masks.position_mask import MOST, PositionMask, whole
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.tree import mask_type


@mask_type
class Causal(PositionMask):
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
        """Check the offset."""
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See up to oneself."""
        return ((None, pos + 1),)

    @property
    def divides_positions(self) -> bool:
        """Whether its test divides positions."""
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Never jump: the end moves with the query."""
        return ()

    def repeats(self, q: int, kv: int) -> bool:
        """Look at the distance of a query and a key alone."""
        return q == kv

    def band(self) -> Band:
        """Give the band that is open to the left."""
        return Band(None, 0, self.offset or 0)


@mask_type
class LocalWindow(PositionMask):
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
        """Check the sides and the offset."""
        whole(self, "left", least=0, optional=True)
        whole(self, "right", least=0, optional=True)
        whole(self, "offset", least=-MOST, optional=True)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See from `left` before to `right` after."""
        start = None if self.left is None else pos - self.left
        end = None if self.right is None else pos + self.right + 1
        return ((start, end),)

    @property
    def divides_positions(self) -> bool:
        """Whether its test divides positions."""
        return False

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Never jump: both sides move with the query."""
        return ()

    def repeats(self, q: int, kv: int) -> bool:
        """Look at the distance of a query and a key alone."""
        return q == kv

    def band(self) -> Band:
        """Give both sides."""
        return Band(self.left, self.right, self.offset or 0)

    def most_keys(self) -> int | None:
        """Count both sides and the query's own position."""
        return None if self.left is None or self.right is None else self.left + self.right + 1

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

    def repeats(self, q: int, kv: int) -> bool:
        """Repeat with the blocks."""
        return q == kv and q % self.block == 0

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Jump where a block begins."""
        return (RowBlocks(self.block, self.offset or 0),)


@mask_type
class BlockSlidingWindow(PositionMask):
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

    def own_block(self) -> tuple[int, int] | None:
        """Give the block, where a window is one block, and query 0 sits at key 0."""
        return (self.block, self.block) if (self.window, self.offset) == (1, 0) else None

    def repeats(self, q: int, kv: int) -> bool:
        """Repeat with the blocks."""
        return q == kv and q % self.block == 0

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Jump where a block begins."""
        return (RowBlocks(self.block, self.offset or 0),)

    def most_keys(self) -> int | None:
        """Count the tokens of the window."""
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
        """Check the limit."""
        whole(self, "limit", least=0, most=BIG)

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """See up to the limit."""
        return ((None, self.limit),)

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Never jump: the limit is the same for every query."""
        return ()

    def at(self, spots: Spots) -> Any:
        """Compare keys alone."""
        return (spots.kv_pos < self.limit)[None, None, None, :]

    @property
    def is_of_keys(self) -> bool:
        """Whether it allows the same keys to every query."""
        return True

    def key_limit(self) -> int:
        """Give the limit."""
        return self.limit
