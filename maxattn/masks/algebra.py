"""The algebra of masks: and, or, not, their two constants, and the canonical form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import reduce
from typing import Any

import jax

from maxattn.masks.base import Mask, Span, Spots
from maxattn.masks.tree import leaf, mask_type


@mask_type
class Full(Mask):
    """Allow every pair.

    >>> from maxattn import masks
    >>> print(masks.Full().show(3, 4))
    Full()
    3 queries down, 4 keys across
    █ █ █ █
    █ █ █ █
    █ █ █ █
    """

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Give one interval without ends."""
        return ((None, None),)

    def at(self, spots: Spots) -> Any:
        """Give one True."""
        return spots.xp.ones((1, 1, 1, 1), dtype=bool)


@mask_type
class Empty(Mask):
    """Allow no pair.

    >>> from maxattn import masks
    >>> print(masks.Empty().show(2, 4))
    Empty()
    2 queries down, 4 keys across
    · · · ·
    · · · ·
    """

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Give no interval."""
        return ()

    def at(self, spots: Spots) -> Any:
        """Give one False."""
        return spots.xp.zeros((1, 1, 1, 1), dtype=bool)


class _Joined(Mask):
    """Hold the masks that `And` and `Or` join."""

    args: tuple[Mask, ...]

    def parts(self) -> tuple[Mask, ...]:
        """List the masks joined."""
        return self.args

    def over_leaves(self, change: Callable[[Mask], Mask]) -> Mask:
        """Apply a change below this connective."""
        return type(self)(tuple(arg.over_leaves(change) for arg in self.args))  # pyright: ignore[reportCallIssue]

    def _repr(self, sign: str) -> str:
        return f" {sign} ".join(
            f"({arg})" if isinstance(arg, _Joined) else str(arg) for arg in self.args
        )


@mask_type
class And(_Joined):
    """Allow what all of several masks allow.

    Args:
        args: the masks, at least one.

    >>> from maxattn import masks
    >>> print((masks.Causal() & masks.KeyLimit(2)).show(4, 4))
    Causal(offset=0) & KeyLimit(2)
    4 queries down, 4 keys across
    █ · · ·
    █ █ · ·
    █ █ · ·
    █ █ · ·
    """

    args: tuple[Mask, ...] = leaf()

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Intersect the intervals, pair by pair."""
        return reduce(
            lambda a, b: _intersect(a, b, xp), (arg.spans(q_pos, xp, data) for arg in self.args)
        )

    def at(self, spots: Spots) -> Any:
        """Join with `&`."""
        return reduce(lambda a, b: a & b, (arg.at(spots) for arg in self.args))

    def terms(self) -> tuple[Mask, ...]:
        """List the masks that must all allow a pair."""
        return self.args

    def most_keys(self) -> int | None:
        """Take the least bound that one of the masks gives."""
        return min((n for arg in self.args if (n := arg.most_keys()) is not None), default=None)

    def __repr__(self) -> str:
        """Write the masks joined by `&`."""
        return self._repr("&")


@mask_type
class Or(_Joined):
    """Allow what any of several masks allows.

    Args:
        args: the masks, at least one.

    >>> from maxattn import masks
    >>> print((masks.LocalWindow(1, 0) | masks.KeyLimit(1)).show(5, 5))
    KeyLimit(1) | LocalWindow(1, 0, offset=0)
    5 queries down, 5 keys across
    █ · · · ·
    █ █ · · ·
    █ █ █ · ·
    █ · █ █ ·
    █ · · █ █
    """

    args: tuple[Mask, ...] = leaf()

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Put the intervals side by side."""
        return tuple(span for arg in self.args for span in arg.spans(q_pos, xp, data))

    def at(self, spots: Spots) -> Any:
        """Join with `|`."""
        return reduce(lambda a, b: a | b, (arg.at(spots) for arg in self.args))

    def __repr__(self) -> str:
        """Write the masks joined by `|`."""
        return self._repr("|")


@mask_type
class Not(Mask):
    """Allow what a mask forbids.

    Args:
        arg: the mask.

    >>> from maxattn import masks
    >>> print((~masks.Causal()).show(4, 4))
    ~Causal(offset=0)
    4 queries down, 4 keys across
    · █ █ █
    · · █ █
    · · · █
    · · · ·
    """

    arg: Mask = leaf()

    def parts(self) -> tuple[Mask, ...]:
        """List the one mask below."""
        return (self.arg,)

    def over_leaves(self, change: Callable[[Mask], Mask]) -> Mask:
        """Apply a change below the negation."""
        return Not(self.arg.over_leaves(change))

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Take the gaps: the upper bound of a complement is the complement of a lower bound."""
        return _complement(self.arg.spans(q_pos, xp, not data), xp)

    def at(self, spots: Spots) -> Any:
        """Negate."""
        return ~self.arg.at(spots)

    def __repr__(self) -> str:
        """Write `~` before the mask."""
        return f"~({self.arg})" if isinstance(self.arg, _Joined) else f"~{self.arg}"


def canonical(mask: Mask, negated: bool = False) -> Mask:
    """Rewrite in negation normal form: flat, without repeats, sorted, Full and Empty absorbed."""
    if isinstance(mask, Not):
        return canonical(mask.arg, not negated)
    if isinstance(mask, _Joined):
        kind = And if isinstance(mask, And) != negated else Or
        return _join(kind, [canonical(arg, negated) for arg in mask.args])
    simple = mask.simplified()
    return _negated(simple) if negated else simple


def _negated(mask: Mask) -> Mask:
    if isinstance(mask, Full):
        return Empty()
    return Full() if isinstance(mask, Empty) else Not(mask)


def _join(kind: type[And] | type[Or], args: list[Mask]) -> Mask:
    unit, zero, other = (Full(), Empty(), Or) if kind is And else (Empty(), Full(), And)
    flat: list[Mask] = []
    for arg in args:
        for part in arg.args if isinstance(arg, kind) else (arg,):
            if part != unit and not _among(part, flat):
                flat.append(part)
    if zero in flat or any(isinstance(arg, Not) and _among(arg.arg, flat) for arg in flat):
        return zero
    kept = _kept(flat, other)
    if len(kept) < 2:
        return kept[0] if kept else unit
    return kind(tuple(sorted(kept, key=_order)))


def _kept(masks: list[Mask], other: type[And] | type[Or]) -> list[Mask]:
    """Drop, one after the other, each mask to which one that is still there leaves no say.

    Of `a | b` and `b | a` one stays.
    """
    kept = masks
    for mask in masks:
        rest = [x for x in kept if x is not mask]
        kept = rest if _absorbed(mask, rest, other) else kept
    return kept


def _absorbed(mask: Mask, among: list[Mask], other: type[And] | type[Or]) -> bool:
    """Tell whether another mask leaves this one no say, as `a` does `a | b` in `a & (a | b)`."""
    mine = mask.args if isinstance(mask, other) else (mask,)
    rivals = ((x.args if isinstance(x, other) else (x,)) for x in among)
    return any(all(_among(part, mine) for part in rival) for rival in rivals)


def _among(mask: Mask, others: Iterable[Mask]) -> bool:
    """Tell whether a mask is one of others, with the very same arrays.

    Forms of two arrays are equal, not the same.
    """
    mine, shape = jax.tree.flatten(mask)
    found = ((leaves, other) for leaves, other in map(jax.tree.flatten, others) if other == shape)
    return any(all(a is b for a, b in zip(mine, leaves, strict=True)) for leaves, _ in found)


def _order(mask: Mask) -> tuple[Any, ...]:
    """Order masks by kind and numbers; where only arrays differ, the order given is kept."""
    numbers = (getattr(mask, f.name) for f in fields(mask) if not f.metadata.get("leaf"))  # pyright: ignore[reportArgumentType]
    return (
        type(mask).__name__,
        tuple((n is not None, n or 0) for n in numbers),
        tuple(_order(part) for part in mask.parts()),
    )


def _intersect(a: tuple[Span, ...], b: tuple[Span, ...], xp: Any) -> tuple[Span, ...]:
    return tuple(
        (_pick(xp.maximum, x[0], y[0]), _pick(xp.minimum, x[1], y[1])) for x in a for y in b
    )


def _pick(choose: Any, a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else choose(a, b)


def _complement(spans: tuple[Span, ...], xp: Any) -> tuple[Span, ...]:
    # Where an interval is empty (lo >= hi) its two gaps meet or overlap, and so cover everything,
    # as they should.
    rest: tuple[Span, ...] = ((None, None),)
    for lo, hi in spans:
        gaps = ((None, lo),) * (lo is not None) + ((hi, None),) * (hi is not None)
        rest = _intersect(rest, gaps, xp)
    return rest
