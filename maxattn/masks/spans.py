"""Join lists of key intervals by `&`, `|` and `~`; the lists' lengths add and do not multiply.

An interval is (start, end); None is no bound. Intervals whose ends are numbers are sorted and
merged. Ends that depend on the query are arrays: of numpy, of jax, or inside a kernel.
"""

from __future__ import annotations

from typing import Any

BIG = 2**30
"""The end of an interval that has no upper bound."""

MOST_SPANS = 32
"""The most intervals per query; a mask with more is bounded by fewer intervals, or refused."""

FEW_PAIRS = 8  # up to this many pairs of intervals, joining each pair is cheaper than sorting

Span = tuple[Any, Any]
"""A half-open interval of key positions; None is an end without a bound."""

Spans = tuple[Span, ...]
WHOLE: Spans = ((None, None),)


def union(spans: Spans) -> Spans:
    """Return the union of intervals; merge intervals of numbers, and drop those that are empty."""
    fixed = _merged([span for span in spans if _is_fixed(span)])
    if (None, None) in fixed:
        return WHOLE
    if len(fixed) == sum(map(_is_fixed, spans)):  # nothing was merged: the order stays
        return spans
    return (*fixed, *(span for span in spans if not _is_fixed(span)))


def intersection(a: Spans, b: Spans, xp: Any) -> Spans:
    """Return the intersection of m with n intervals: at most m + n - 1 or `FEW_PAIRS` intervals."""
    if len(a) * len(b) <= FEW_PAIRS or 1 in (len(a), len(b)) or _are_fixed((*a, *b)):
        return union(tuple(_both(x, y, xp) for x in a for y in b))
    lows, highs = zip(*_disjoint(a, xp), *_disjoint(b, xp), strict=True)
    # A key in both a and b has two more starts than ends before it: from start i + 1 to end i.
    return tuple(zip(_sorted(lows, xp)[1:], _sorted(highs, xp)[:-1], strict=True))


def complement(spans: Spans, xp: Any) -> Spans:
    """Return the gaps between n intervals: n + 1 gaps, or at most `FEW_PAIRS`."""
    if _are_fixed(spans):
        gaps: list[Span] = []
        start: int | None = None
        for lo, hi in _merged(list(spans)):
            gaps += [] if lo is None else [(start, lo)]
            start = hi
            if hi is None:
                return tuple(gaps)
        return (*gaps, (start, None))
    if 2 ** len(spans) <= FEW_PAIRS:
        rest = WHOLE
        for lo, hi in spans:
            # If an interval is empty (lo >= hi), its two sides meet or overlap, so that together
            # they cover all keys, as they should.
            sides = ((None, lo),) * (lo is not None) + ((hi, None),) * (hi is not None)
            rest = intersection(rest, sides, xp)
        return rest
    lows, highs = _ends(spans, xp)
    # A key in no interval has as many starts as ends before it.
    return ((None, lows[0]), *zip(highs[:-1], lows[1:], strict=True), (highs[-1], None))


def _is_fixed(span: Span) -> bool:
    return all(end is None or isinstance(end, int) for end in span)


def _are_fixed(spans: Spans) -> bool:
    return all(map(_is_fixed, spans))


def _merged(fixed: list[Span]) -> list[Span]:
    """Sort intervals of numbers, join intervals that touch, and drop empty intervals."""
    ends = sorted((lo or 0, BIG if hi is None else hi) for lo, hi in fixed)
    merged: list[list[int]] = []
    for lo, hi in ends:
        if merged and lo <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], hi)
        elif lo < hi:
            merged.append([lo, hi])
    return [(lo if lo > 0 else None, hi if hi < BIG else None) for lo, hi in merged]


def _both(a: Span, b: Span, xp: Any) -> Span:
    return _open_or(_most, a[0], b[0], xp), _open_or(_least, a[1], b[1], xp)


def _open_or(choose: Any, a: Any, b: Any, xp: Any) -> Any:
    return b if a is None else a if b is None else choose(a, b, xp)


def _least(a: Any, b: Any, xp: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else xp.minimum(a, b)


def _most(a: Any, b: Any, xp: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else xp.maximum(a, b)


def _ends(spans: Spans, xp: Any) -> tuple[list[Any], list[Any]]:
    """Return the sorted starts and the sorted ends; an empty interval starts at its end."""
    closed = [(0 if lo is None else lo, BIG if hi is None else hi) for lo, hi in spans]
    lows, highs = [_least(lo, hi, xp) for lo, hi in closed], [hi for _, hi in closed]
    return _sorted(lows, xp), _sorted(highs, xp)


def _disjoint(spans: Spans, xp: Any) -> Spans:
    """Return intervals that cover the same keys, sorted and without overlap."""
    lows, highs = _ends(spans, xp)
    starts = [lows[0], *(_most(a, b, xp) for a, b in zip(lows[1:], highs[:-1], strict=True))]
    return tuple(zip(starts, highs, strict=True))


def _sorted(values: Any, xp: Any) -> list[Any]:
    if hasattr(xp, "sort"):
        return list(xp.sort(xp.stack(xp.broadcast_arrays(*values)), axis=0))
    found: list[Any] = []
    for value in values:  # a kernel cannot sort: insert each value by minima and maxima
        last = value
        for i, x in enumerate(found):
            found[i], last = _least(x, last, xp), _most(x, last, xp)
        found.append(last)
    return found
