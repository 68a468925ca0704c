"""Unions of many rectangles as one mask, with a table of the intervals that each query sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from maxattn.errors import InputError
from maxattn.masks.algebra import And, Empty, Not, Or
from maxattn.masks.base import Mask
from maxattn.masks.packed import BandedMask, Bands
from maxattn.masks.positions import Rectangle
from maxattn.masks.spans import BIG
from maxattn.masks.tree import HashedOnce, mask_type

Corner = tuple[int, int, int, int]
CELLS = 2**22  # most pairs of a band and a rectangle that the sweep compares at a time


@mask_type
class Rectangles(BandedMask):
    """Allow the pairs in any of many rectangles; `|` makes it of more than 32 masks.

    Its intervals are those of a query after overlapping ones are joined, not one per rectangle.

    Args:
        corners: (q_start, q_stop, kv_start, kv_stop) of each rectangle.

    >>> from maxattn import masks
    >>> joined = masks.Or(tuple(masks.Rectangle(i, i + 1, 0, i + 1) for i in range(40)))
    >>> joined.bind(40, 40)
    Rectangles(40 of them, the first (0, 1, 0, 1))
    """

    corners: tuple[Corner, ...]

    def __post_init__(self) -> None:
        if isinstance(self.corners, HashedOnce):  # checked already
            return
        try:
            each = (Rectangle(*corner) for corner in self.corners)
            found = [(x.q_start, x.q_stop, x.kv_start, x.kv_stop) for x in each]
        except TypeError:
            rule = "corners must be a tuple of (q_start, q_stop, kv_start, kv_stop)"
            remedy = "join masks.Rectangle by | instead"
            raise InputError("Rectangles.corners", "other values", rule, remedy) from None
        object.__setattr__(self, "corners", HashedOnce(sorted(set(found))))

    @property
    def bands(self) -> Bands:
        return _bands(self.corners)

    def simplified(self) -> Mask:
        return self if any(a < b and c < d for a, b, c, d in self.corners) else Empty()

    def __repr__(self) -> str:
        first = self.corners[0] if self.corners else None
        return f"Rectangles({len(self.corners)} of them, the first {first})"


@lru_cache(maxsize=64)
def _bands(corners: tuple[Corner, ...]) -> Bands:
    """Sweep over the queries at which a rectangle begins or ends."""
    table = np.array([x for x in corners if x[0] < x[1] and x[2] < x[3]], np.int64).reshape(-1, 4)
    table = table[np.argsort(table[:, 2], kind="stable")]
    turns = np.unique(table[:, :2])
    rows = max(1, CELLS // max(1, len(table)))
    found = [_intervals(table, turns[i : i + rows]) for i in range(0, len(turns), rows)]
    most = max((lo.shape[1] for lo, _ in found), default=0)
    room = 2 ** len(turns).bit_length()
    lo, hi = (np.zeros((room, most), np.int32) for _ in range(2))
    first = 1
    for some in found:
        for whole, part in zip((lo, hi), some, strict=True):
            whole[first : first + len(part), : part.shape[1]] = part
        first += len(some[0])
    padded = np.full(room - 1, BIG, np.int32)
    padded[: len(turns)] = turns
    return Bands(padded, lo, hi, len(turns))


def _intervals(table: np.ndarray, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the joined intervals [turns, M] of the bands that begin at `turns`."""
    active = (table[:, 0] <= turns[:, None]) & (turns[:, None] < table[:, 1])
    start = np.broadcast_to(table[:, 2], active.shape)
    reach = np.maximum.accumulate(np.where(active, table[:, 3], -1), axis=1)
    before = np.concatenate([np.full((len(turns), 1), -1), reach[:, :-1]], axis=1)
    begins = active & (start > before)
    row, at = np.nonzero(begins)
    number = begins.cumsum(axis=1)[row, at] - 1
    lo = np.zeros((len(turns), int(begins.sum(axis=1).max(initial=0))), np.int64)
    hi = lo.copy()
    lo[row, number] = start[row, at]
    # An interval ends where the keys reach before the next one of its band begins.
    is_last = np.append(row[1:] != row[:-1], True) if row.size else np.zeros(0, bool)
    next_at = np.append(at[1:], 0)
    hi[row, number] = np.where(is_last, reach[row, -1], before[row, next_at])
    return lo, hi


# ---- joining -------------------------------------------------------------------------------------


def folded(kind: type[And] | type[Or], parts: Sequence[Mask]) -> list[Mask]:
    """Replace rectangles that are joined by `|` by one mask, under common terms too.

        R1 | R2 | ...  ->  Rectangles        (R1 & m) | (R2 & m) | ...  ->  Rectangles & m

    For `&` the parts are `~R1`, `~R2`, ..., which become `~Rectangles`.
    """
    groups: dict[Any, list[Corner]] = defaultdict(list)
    others: dict[Any, tuple[Mask, ...]] = {}
    members: dict[Any, list[Mask]] = defaultdict(list)
    rest: list[Mask] = []
    for part in parts:
        terms = part.terms() if kind is Or else (part.arg,) if isinstance(part, Not) else ()
        some = [term for term in terms if isinstance(term, Rectangle | Rectangles)]
        if len(some) != 1:
            rest.append(part)
            continue
        common = tuple(term for term in terms if term is not some[0])
        key = tuple(sorted(str(hash(term.identity)) for term in common))
        groups[key] += _corners_of(some[0])
        others[key] = common
        members[key].append(part)
    for key, corners in groups.items():
        if len(members[key]) == 1:
            rest += members[key]
            continue
        made: Mask = Rectangles(HashedOnce(sorted(set(corners))))
        if others[key]:
            made = And((*others[key], made)).canonical()
        rest.append(made if kind is Or else Not(made))
    return rest


def _corners_of(mask: Any) -> Sequence[Corner]:
    if isinstance(mask, Rectangles):
        return mask.corners
    return [(mask.q_start, mask.q_stop, mask.kv_start, mask.kv_stop)]
