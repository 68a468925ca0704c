"""Sequences packed one after the other in a batch row, with static lengths."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.algebra import Full
from maxattn.masks.base import Lengths, Mask
from maxattn.masks.positions import BlockSlidingWindow, PositionMask
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import BIG, Span
from maxattn.masks.tree import HashedOnce, mask_type, text

if TYPE_CHECKING:
    from jaxtyping import Int

MOST_SEGMENTS = 2**16
SHOWN = 8  # most runs of equal lengths that a mask's text lists


class Packing(HashedOnce[int]):
    """Lengths of segments, with runs of equal lengths as its text."""

    def __repr__(self) -> str:
        runs = [(length, len(list(same))) for length, same in groupby(self)]
        said = [f"{length} x {many}" if many > 1 else str(length) for length, many in runs[:SHOWN]]
        if len(runs) > SHOWN:
            said.append(f"... {len(self)} segments of {sum(self)} tokens")
        return f"({', '.join(said)}{',' * (len(said) == 1)})"


class Bands(NamedTuple):
    """The bands of queries that see the same keys, as tables for a binary search."""

    # [2**n - 1], the first query of each band but the first one; padded with `BIG`
    turns: Int[np.ndarray, " R"]
    # lo, hi: [2**n, M], the intervals of each band, sorted, then empty ones
    lo: Int[np.ndarray, "R1 M"]
    hi: Int[np.ndarray, "R1 M"]
    count: int  # number of turns


class BandedMask(PositionMask):
    """A mask whose intervals are those of the band that a query is in."""

    offset: ClassVar[int] = 0

    @property
    def bands(self) -> Bands:
        raise NotImplementedError(type(self).__name__)

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        bands = self.bands
        ends = range(bands.lo.shape[1])
        if not hasattr(xp, "searchsorted"):  # a kernel compares with every turn
            return tuple(_stepped(bands, i, pos, xp) for i in ends)
        turns, lo, hi = (xp.asarray(x, dtype=xp.int32) for x in bands[:3])
        at, step = xp.zeros_like(pos), (bands.turns.size + 1) // 2
        while step:  # count the turns at or before the query, bit by bit
            at = xp.where(turns[at + (step - 1)] <= pos, at + step, at)
            step //= 2
        return tuple((lo[:, i][at], hi[:, i][at]) for i in ends)

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return (RowBlocks(BIG, 0, tuple(self.bands.turns[: self.looked_up].tolist())),)

    def most_keys(self) -> int:
        return int((self.bands.hi - self.bands.lo).sum(axis=1).max(initial=0))

    @property
    def divides_positions(self) -> bool:
        return False

    @property
    def looked_up(self) -> int:
        return self.bands.count


def _stepped(bands: Bands, i: int, pos: Any, xp: Any) -> Span:
    """Return interval i of a query by comparing with every turn."""
    lo, hi = (pos * 0 + int(table[0, i]) for table in (bands.lo, bands.hi))
    for turn in range(bands.count):
        past = pos >= int(bands.turns[turn])
        lo = xp.where(past, int(bands.lo[turn + 1, i]), lo)
        hi = xp.where(past, int(bands.hi[turn + 1, i]), hi)
    return lo, hi


@mask_type
class SegmentLengths(BandedMask):
    """Allow pairs of the same segment: the mask that `Segments.of_lengths` makes.

    Args:
        lengths: number of queries of each segment.
        kv_lengths: number of keys of each segment; default `lengths`.

    >>> from maxattn import masks
    >>> print(masks.SegmentLengths((2, 1), (1, 3)).show(3, 4))
    Segments.of_lengths((2, 1), (1, 3))
    3 queries down, 4 keys across
    █ · · ·
    █ · · ·
    · █ █ █
    """

    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        q = _checked("lengths", self.lengths)
        kv = q if self.kv_lengths is None else _checked("kv_lengths", self.kv_lengths)
        if len(q) != len(kv):
            rule = f"kv_lengths must have one length for each of the {len(q)} segments"
            raise InputError("kv_lengths", f"{len(kv)} lengths", rule, f"give {len(q)} lengths")
        some = [(a, b) for a, b in zip(q, kv, strict=True) if a or b] or [(0, 0)]
        q, kv = (Packing(x) for x in zip(*some, strict=True))
        object.__setattr__(self, "lengths", q)
        object.__setattr__(self, "kv_lengths", None if q == kv else kv)

    @property
    def keys(self) -> tuple[int, ...]:
        """The number of keys of each segment."""
        return self.lengths if self.kv_lengths is None else self.kv_lengths

    @property
    def bands(self) -> Bands:
        return _bands(self.lengths, self.keys)

    def bound_to(self, lengths: Lengths) -> Mask:
        _check_sum("lengths", self.lengths, "queries", lengths.q_len)
        name = "lengths" if self.kv_lengths is None else "kv_lengths"
        _check_sum(name, self.keys, "keys", lengths.kv_len)
        if len(self.lengths) < 2:
            return Full()
        block = self.lengths[0]
        even = self.kv_lengths is None and set(self.lengths[:-1]) == {block}
        return BlockSlidingWindow(block, 1, 0) if even and self.lengths[-1] <= block else self

    def own_block(self) -> tuple[int, int] | None:
        first = self.lengths[0], self.keys[0]
        is_every = set(zip(self.lengths, self.keys, strict=True)) == {first}
        return first if is_every and min(first) > 0 else None

    def __repr__(self) -> str:
        kv = "" if self.kv_lengths is None else f", {self.kv_lengths}"
        return f"Segments.of_lengths({self.lengths}{kv})"


@lru_cache(maxsize=64)
def _bands(lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> Bands:
    room = 2 ** len(lengths).bit_length()
    q, kv = np.full(room - 1, BIG, np.int32), np.zeros(room + 1, np.int32)
    q[: len(lengths)] = np.cumsum(lengths)
    kv[1:] = sum(kv_lengths)
    kv[1 : len(lengths) + 1] = np.cumsum(kv_lengths)
    # The position after a segment's last query is a turn.
    return Bands(q, kv[:-1, None], kv[1:, None], len(lengths))


def _checked(name: str, given: Any) -> Packing:
    if isinstance(given, Packing):
        return given
    try:
        values: list[Any] = given.tolist() if isinstance(given, np.ndarray) else list(given)
        has_bool = any(isinstance(x, (bool, np.bool_)) for x in values)
        found = None if has_bool else [index(x) for x in values]
    except (TypeError, jax.errors.JAXTypeError):
        found = None
    if found is None:
        rule = "lengths of segments must be whole numbers, known before tracing"
        remedy = "give a tuple of Python ints; give traced lengths as ids to masks.Segments"
        raise InputError(name, text(given)[:80], rule, remedy)
    if len(found) > MOST_SEGMENTS:
        rule = f"there may be at most {MOST_SEGMENTS} segments"
        raise InputError(name, f"{len(found)} lengths", rule, "give segment ids to masks.Segments")
    if min(found, default=0) < 0:
        at = next(i for i, length in enumerate(found) if length < 0)
        rule = "the length of a segment must be 0 or more"
        raise InputError(f"{name}[{at}]", found[at], rule, "give its number of tokens")
    if sum(found) > BIG:
        rule = f"the lengths must add up to at most {BIG}"
        raise InputError(name, f"{sum(found)} tokens", rule, "give fewer tokens")
    return Packing(found)


def _check_sum(name: str, lengths: tuple[int, ...], what: str, wanted: int) -> None:
    found = sum(lengths)
    if found == wanted:
        return
    rule = f"the lengths must add up to all {wanted} {what}"
    remedy = "give the lengths of this call"
    if found < wanted:
        remedy = f"give the other {wanted - found} as one more length; if they are padding, also"
        remedy += f" join & masks.KeyLimit({found})"
    raise InputError(name, f"{found} tokens in {len(lengths)} segments", rule, remedy)
