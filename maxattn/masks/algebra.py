"""The algebra of masks: `And`, `Or`, `Not`, `Full`, `Empty`, and the canonical form of a mask.

Joining n masks makes a few dictionary look-ups per mask, so that a mask of hundreds of parts is
built in milliseconds; comparing all n * n pairs of trees would take minutes.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import Mask, Spots
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import MOST_SPANS, WHOLE, Span, Spans, complement, intersection, union
from maxattn.masks.tile_kinds import TileBounds, Tiles
from maxattn.masks.tree import leaf, mask_type, text

MOST_MASKS, MOST_LEVELS = 1024, 128


@mask_type
class Full(Mask):
    """Allow every pair of a query and a key.

    >>> from maxattn import masks
    >>> masks.Full() & masks.Causal()
    Causal()
    """

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        return ((None, None),)

    def repeats(self, q: int, kv: int) -> bool:
        return True

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()


@mask_type
class Empty(Mask):
    """Allow no pair.

    >>> from maxattn import masks
    >>> masks.Causal() & ~masks.Causal()
    Empty()
    """

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        return ()

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()


class _Joined(Mask):
    """Masks joined by `&` or `|`; the operator also joins the masks' results and tile bounds."""

    join: ClassVar[Callable[[Any, Any], Any]]
    sign: ClassVar[str]
    args: tuple[Mask, ...]

    def __post_init__(self) -> None:
        given = tuple(self.args) if isinstance(self.args, list | tuple) else self.args
        if not isinstance(given, tuple) or not given or not _are_masks(given):
            name, rule = type(self).__name__, "it must be a tuple of masks, at least one"
            remedy = f"write {name}((a, b)), or a {self.sign} b"
            raise InputError(f"{name}.args", text(self.args), rule, remedy)
        object.__setattr__(self, "args", given)

    def parts(self) -> tuple[Mask, ...]:
        return self.args

    def over_leaves(self, change: Callable[[Mask], Mask]) -> Mask:
        return type(self)(tuple(arg.over_leaves(change) for arg in self.args))  # pyright: ignore[reportCallIssue]

    def at(self, spots: Spots) -> Any:
        return reduce(type(self).join, (arg.at(spots) for arg in self.args))

    def repeats(self, q: int, kv: int) -> bool:
        return all(arg.repeats(q, kv) for arg in self.args)

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        bounds = [arg.on_tiles(tiles) for arg in self.args if arg.has_data]
        known = tuple(arg for arg in self.args if not arg.has_data)
        if known:  # the join of all masks without arrays has exact bounds
            bounds.append(tiles.of_positions(type(self)(known).canonical()))  # pyright: ignore[reportCallIssue]
        return reduce(type(self).join, bounds)

    def __repr__(self) -> str:
        each = (f"({arg})" if isinstance(arg, _Joined) else str(arg) for arg in self.args)
        return f" {self.sign} ".join(each)


@mask_type
class And(_Joined):
    """Allow the pairs that every one of several masks allows: `a & b`.

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

    join, sign = operator.and_, "&"
    args: tuple[Mask, ...] = leaf()

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        found = (arg.spans(q_pos, xp, data) for arg in self.args)
        return reduce(lambda a, b: intersection(a, b, xp), found)

    def terms(self) -> tuple[Mask, ...]:
        return self.args

    def most_keys(self) -> int | None:
        return min((n for arg in self.args if (n := arg.most_keys()) is not None), default=None)


@mask_type
class Or(_Joined):
    """Allow the pairs that at least one of several masks allows: `a | b`.

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

    join, sign = operator.or_, "|"
    args: tuple[Mask, ...] = leaf()

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        return union(tuple(x for arg in self.args for x in arg.spans(q_pos, xp, data)))


@mask_type
class Not(Mask):
    """Allow the pairs that a mask forbids: `~a`.

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

    def __post_init__(self) -> None:
        if not _are_masks((self.arg,)):
            rule, remedy = "it must be a mask", "write Not(a), or ~a"
            raise InputError("Not.arg", text(self.arg), rule, remedy)

    def parts(self) -> tuple[Mask, ...]:
        return (self.arg,)

    def over_leaves(self, change: Callable[[Mask], Mask]) -> Mask:
        return Not(self.arg.over_leaves(change))

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        # The complement of a lower bound is an upper bound of the complement.
        return complement(self.arg.spans(q_pos, xp, not data), xp)

    def at(self, spots: Spots) -> Any:
        return ~self.arg.at(spots)

    def repeats(self, q: int, kv: int) -> bool:
        return self.arg.repeats(q, kv)

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        return ~self.arg.on_tiles(tiles)

    def __repr__(self) -> str:
        return f"~({self.arg})" if isinstance(self.arg, _Joined) else f"~{self.arg}"


def _are_masks(given: tuple[Any, ...]) -> bool:
    # By kinds, of which there are few, since a union may join thousands of masks.
    return all(issubclass(kind, Mask) for kind in set(map(type, given)))


def canonical(mask: Mask, negated: bool = False) -> Mask:
    """Return the canonical form of a mask, or of its negation; see `Mask.canonical`."""
    if mask.is_normal and not negated:
        return mask
    if isinstance(mask, Not):
        return canonical(mask.arg, not negated)
    if isinstance(mask, _Joined):
        kind = And if isinstance(mask, And) != negated else Or
        return _join(kind, [canonical(arg, negated) for arg in mask.args])
    simple = mask.simplified()
    if not negated:
        return simple
    if isinstance(simple, Full):
        return Empty()
    return Full() if isinstance(simple, Empty) else Not(simple)


def _join(kind: type[And] | type[Or], args: list[Mask]) -> Mask:
    unit, zero, other = (Full, Empty, Or) if kind is And else (Empty, Full, And)
    flat: dict[Any, Mask] = {}
    for arg in args:
        for part in arg.args if isinstance(arg, kind) else (arg,):
            if not isinstance(part, unit):
                flat.setdefault(part.identity, part)
    negated = (part.arg.identity for part in flat.values() if isinstance(part, Not))
    absurd = any(identity in flat for identity in negated)
    if absurd or any(isinstance(part, zero) for part in flat.values()):
        return zero()
    from maxattn.masks import rectangles

    kept = _without_absorbed(list(flat.values()), other)
    terms = (x for m in kept for x in (m.arg if isinstance(m, Not) else m).terms())
    if len(kept) > MOST_SPANS or any(isinstance(x, rectangles.Rectangles) for x in terms):
        kept = rectangles.folded(kind, kept)
    if len(kept) < 2:
        return kept[0] if kept else unit()
    joined = kind(tuple(sorted(kept, key=lambda part: part.order)))
    _check_size(joined)
    object.__setattr__(joined, "is_normal", True)  # `canonical` then returns it at once
    return joined


def _without_absorbed(masks: list[Mask], other: type[Mask]) -> list[Mask]:
    """Drop, one after the other, each mask that another remaining mask absorbs.

    In `a & (a | b)`, `a` absorbs `a | b`, since the parts of `a` are among the parts of `a | b`. Of
    two masks with equal parts, such as `a | b` and `b | a`, one is kept.
    """
    if not any(isinstance(mask, other) for mask in masks):
        return masks  # each mask has one part, and all parts differ
    each = (mask.parts() if isinstance(mask, other) else (mask,) for mask in masks)
    parts = [frozenset(part.identity for part in some) for some in each]
    # Index each mask by its rarest part, so that few pairs of masks are compared.
    shared = Counter(part for mine in parts for part in mine)
    rivals: dict[Any, list[int]] = defaultdict(list)
    for i, mine in enumerate(parts):
        rivals[min(mine, key=lambda part: shared[part])].append(i)
    kept = dict(enumerate(masks))
    for i, mine in enumerate(parts):
        near = (j for part in mine for j in rivals.get(part, ()))
        if any(j != i and j in kept and parts[j] <= mine for j in near):
            del kept[i]
    return list(kept.values())


def _check_size(mask: Mask) -> None:
    masks, levels = mask.extent
    if masks > MOST_MASKS or levels > MOST_LEVELS:
        found = f"{masks} masks, {levels} levels of & and |"
        rule = f"a mask must join at most {MOST_MASKS} masks, in at most {MOST_LEVELS} levels"
        remedy = "write it as one masks.Dense, masks.KeyPadding or a PositionMask of your own"
        raise InputError("mask", found, rule, remedy)


def has_few_spans(mask: Mask, data: bool = True) -> bool:
    """Check whether a bound mask has at most `MOST_SPANS` intervals of keys per query."""
    return len(mask.spans(np.zeros(1, np.int32), np, data)) <= MOST_SPANS


def bounded_spans(mask: Mask, q_pos: Any, xp: Any, data: bool) -> Spans:
    """Return a bound mask's intervals of keys, or bounds if a query has more than `MOST_SPANS`.

    The upper bound (`data=True`) drops each term that would bring the kept terms above `MOST_SPANS`
    intervals; the lower bound (`data=False`) allows no key.
    """
    if has_few_spans(mask, data):
        return mask.spans(q_pos, xp, data)
    kept: tuple[Mask, ...] = ()
    for term in mask.terms() if data else ():
        kept = (*kept, term) if has_few_spans(And((*kept, term))) else kept
    return And(kept).spans(q_pos, xp, data) if kept else WHOLE * data
