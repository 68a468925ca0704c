"""A rectangle of pairs whose place is known when tracing."""

from __future__ import annotations

from typing import Any, ClassVar

from maxattn.errors import InputError
from maxattn.masks.algebra import Empty
from maxattn.masks.base import BIG, Mask, Span
from maxattn.masks.position_mask import PositionMask, whole
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.tree import mask_type


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
        """Check the four numbers."""
        for name in ("q_start", "q_stop", "kv_start", "kv_stop"):
            whole(self, name, least=0)
        for axis in ("q", "kv"):
            start, stop = getattr(self, f"{axis}_start"), getattr(self, f"{axis}_stop")
            if stop < start:
                rule = f"it ends at or after {axis}_start, which is {start}"
                raise InputError(f"Rectangle.{axis}_stop", stop, rule, f"give {start} or more")

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See the run of keys from inside of the run of queries, and nothing from outside."""
        stop = xp.where(pos >= self.q_stop, self.kv_start, self.kv_stop)
        return ((pos * 0 + self.kv_start, xp.where(pos < self.q_start, self.kv_start, stop)),)

    def simplified(self) -> Mask:
        """Be `Empty` without a query or a key."""
        none = self.q_start == self.q_stop or self.kv_start == self.kv_stop
        return Empty() if none else self

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        """Jump where the run of queries begins and ends."""
        return (RowBlocks(BIG, 0, (self.q_start, self.q_stop)),)

    def most_keys(self) -> int:
        """Count the keys of the run."""
        return self.kv_stop - self.kv_start

    @property
    def divides_positions(self) -> bool:
        """Whether its test divides positions."""
        return False
