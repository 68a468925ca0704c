"""The canonical form of a mask: identities, absorption, and a bound of its size.

Joining n masks looks each of them up a few times, so that masks of hundreds of parts are made in
milliseconds; n * n comparisons of trees would take minutes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import fields
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from maxattn.errors import InputError

if TYPE_CHECKING:
    from maxattn.masks.base import Mask

MOST_MASKS = 1024
MOST_LEVELS = 128


class Extent(NamedTuple):
    """The number of masks that one is made of, itself included, and of their levels."""

    masks: int
    levels: int


@cache
def field_names(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the leaves of a kind of mask, and its numbers."""
    leaves = tuple(f.name for f in fields(kind) if f.metadata.get("leaf"))
    return leaves, tuple(f.name for f in fields(kind) if f.name not in leaves)


class Normal:
    """What joining a mask with others looks up, each made once."""

    is_normal = False
    """Whether it is known to be canonical: set on what `canonical` makes of several masks."""

    def parts(self) -> tuple[Mask, ...]:
        """List the masks that this one is directly built of."""
        return ()

    @cached_property
    def extent(self) -> Extent:
        """How many masks it is made of, on how many levels."""
        parts = [part.extent for part in self.parts()]
        levels = max((part.levels for part in parts), default=0)
        return Extent(1 + sum(part.masks for part in parts), 1 + levels)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """What is equal for two masks of one structure with the very same arrays."""
        parts = tuple(part.identity for part in self.parts())
        arrays = () if parts else (id(getattr(self, name)) for name in field_names(type(self))[0])
        return type(self), self._numbers(), parts, tuple(arrays)

    @cached_property
    def order(self) -> tuple[Any, ...]:
        """Kind and numbers, by which masks are sorted; of arrays, the order given is kept."""
        numbers = tuple((n is not None, n or 0) for n in self._numbers())
        return type(self).__name__, numbers, tuple(part.order for part in self.parts())

    def _numbers(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in field_names(type(self))[1])

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the fields alone: an identity holds where the arrays stay the same."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the arrays; what masks are nested in is made anew, in no recursion of Python's."""
        return jax.tree.map(lambda x: deepcopy(x, memo), self)


def without_absorbed(masks: list[Mask], other: type[Mask]) -> list[Mask]:
    """Drop, one after the other, each mask that one which is still there absorbs.

    `a` absorbs `a | b` in `a & (a | b)`; of `a | b` and `b | a` one stays.

    Args:
        masks: that are joined, each once.
        other: the connective that does not join them.
    """
    if not any(isinstance(mask, other) for mask in masks):
        return masks  # of one part each, and no two the same
    each = (mask.parts() if isinstance(mask, other) else (mask,) for mask in masks)
    parts = [frozenset(part.identity for part in some) for some in each]
    # Masks are listed by that of their parts which the fewest masks have: few are then compared.
    shared = Counter(part for mine in parts for part in mine)
    rivals: dict[Any, list[int]] = defaultdict(list)
    for i, mine in enumerate(parts):
        rivals[min(mine, key=lambda part: shared[part])].append(i)
    kept = dict(enumerate(masks))
    for i, mine in enumerate(parts):
        near = (j for part in mine for j in rivals.get(part, ()))
        if any(j != i and j in kept and absorbs(parts[j], mine) for j in near):
            del kept[i]
    return list(kept.values())


def absorbs(rival: frozenset[Any], mine: frozenset[Any]) -> bool:
    """Whether a mask with fewer of the same parts decides alone."""
    return rival <= mine


def check_size(mask: Mask) -> None:
    """Refuse a mask of very many masks: each use of it goes through all of them."""
    masks, levels = mask.extent
    if masks <= MOST_MASKS and levels <= MOST_LEVELS:
        return
    found = f"{masks} masks, {levels} levels of & and |"
    rule = f"at most {MOST_MASKS} masks and {MOST_LEVELS} levels are joined"
    remedy = "say it as one masks.Dense, masks.KeyPadding or a PositionMask of your own"
    raise InputError("mask", found, rule, remedy)


def mark_normal(mask: Mask) -> Mask:
    """Note that a mask is canonical, so that joining it does not go through it again."""
    object.__setattr__(mask, "is_normal", True)
    return mask
