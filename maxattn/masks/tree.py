"""Frozen dataclasses that are pytrees: how every mask is registered with jax."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from inspect import getattr_static, isfunction
from typing import Any, TypeVar, dataclass_transform

import jax

from maxattn.errors import InputError
from maxattn.masks.normal_form import field_names

C = TypeVar("C", bound=type)

# What defines which pairs a kind of mask allows, and what follows from it.
MEANING = ("seen", "spans", "at")
ANSWERS = (
    *("simplified", "band", "most_keys", "own_block", "repeats", "own_period", "row_blocks"),
    *("on_tiles", "segment_ids", "key_limit", "is_key_padding", "is_of_keys", "bounds_tiles"),
)


def leaf() -> Any:
    """Mark a field as an array leaf (or as masks that hold some)."""
    return field(metadata={"leaf": True})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(leaf, field))
def mask_type(cls: C) -> C:
    """Make a class a frozen dataclass and a pytree, whose children are the fields of `leaf()`.

    Raises:
        InputError: a property of masks is written as a method, which would always be true.
    """
    properties = {n for c in cls.mro()[1:] for n, x in vars(c).items() if isinstance(x, property)}
    for name in [n for n, written in vars(cls).items() if isfunction(written) and n in properties]:
        rule, remedy = "it is a property of masks", "write @property above it"
        raise InputError(f"{cls.__name__}.{name}", "a method", rule, remedy)
    if any("is_kind" in vars(c) for c in cls.mro()[1:]) and any(n in vars(cls) for n in MEANING):
        # A kind that allows other pairs than the kind it derives from has none of its answers.
        from maxattn.masks.base import Mask

        for name in (n for n in ANSWERS if n not in vars(cls)):
            setattr(cls, name, getattr_static(Mask, name))
    made: Any = dataclass(frozen=True, eq=False, repr=False)(cls)
    made.is_kind = True
    leaves, static = field_names(made)

    def flatten(mask: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(mask, n) for n in leaves), tuple(getattr(mask, n) for n in static)

    def flatten_with_keys(mask: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, aux = flatten(mask)
        return tuple(zip(map(jax.tree_util.GetAttrKey, leaves), children, strict=True)), aux

    def unflatten(aux: tuple[Any, ...], children: Iterable[Any]) -> Any:
        # Not through __init__: jax also puts placeholders, specs and batched tracers where the
        # arrays were.
        mask = object.__new__(made)
        for name, value in zip(leaves + static, (*children, *aux), strict=True):
            object.__setattr__(mask, name, value)
        return mask

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made
