"""Make mask classes frozen dataclasses and pytrees (`mask_type`), and check masks' numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from inspect import getattr_static, isfunction
from operator import index
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.spans import BIG

C = TypeVar("C", bound=type)
T = TypeVar("T")
MOST = BIG // 2  # largest number: a position plus an offset plus a width then fits int32

# The methods that define which pairs a mask class allows, and the answers that depend on them.
MEANING = ("seen", "spans", "at")
ANSWERS = (
    *("simplified", "band", "most_keys", "own_block", "repeats", "own_period", "row_blocks"),
    *("on_tiles", "segment_ids", "key_limit", "is_key_padding", "is_of_keys", "bounds_tiles"),
)


def leaf() -> Any:
    """Mark a field as an array, or as masks: it becomes a child of the pytree."""
    return field(metadata={"leaf": True})


def number(least: int, *, optional: bool = False, most: int = MOST, default: Any = MISSING) -> Any:
    """Mark a field as a whole number from `least` to `most`, or None if it is optional."""
    checks = {"least": least, "optional": optional, "most": most}
    return field(default=default, metadata={"checks": checks})


@cache
def field_names(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a mask class's arrays or masks, and the names of its numbers."""
    leaves = tuple(f.name for f in fields(kind) if f.metadata.get("leaf"))
    return leaves, tuple(f.name for f in fields(kind) if f.name not in leaves)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(leaf, number, field))
def mask_type(cls: C) -> C:
    """Make a mask class a frozen dataclass and a pytree, whose children are its `leaf()` fields.

    Raises:
        InputError: the class defines a property of `Mask` as a method, which is always true.
    """
    properties = {n for c in cls.mro()[1:] for n, x in vars(c).items() if isinstance(x, property)}
    for name in [n for n, written in vars(cls).items() if isfunction(written) and n in properties]:
        rule, remedy = "it must be a property, as in Mask", "write @property above it"
        raise InputError(f"{cls.__name__}.{name}", "a method", rule, remedy)
    if any("is_kind" in vars(c) for c in cls.mro()[1:]) and any(n in vars(cls) for n in MEANING):
        # A class that allows other pairs than its parent inherits none of the parent's answers.
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
        # __init__ is not called, since its checks would refuse the placeholders, specs and batched
        # tracers that jax also puts in place of the arrays.
        mask = object.__new__(made)
        for name, value in zip(leaves + static, (*children, *aux), strict=True):
            object.__setattr__(mask, name, value)
        return mask

    jax.tree_util.register_pytree_with_keys(made, flatten_with_keys, unflatten, flatten)
    return made


def check_numbers(mask: Any) -> None:
    """Check every field that `number()` marks, and convert it to an int."""
    for f in fields(mask):
        if "checks" in f.metadata:
            whole(mask, f.name, **f.metadata["checks"])


def whole(value: Any, name: str, least: int, optional: bool = False, most: int = MOST) -> None:
    """Check that a field of a mask is a whole number in range, and convert it to an int."""
    found: Any = getattr(value, name)
    where = f"{type(value).__name__}.{name}"
    if found is None and optional:
        return
    none = ", or None" if optional else ""
    try:
        as_int = None if found is None or isinstance(found, (bool, np.bool_)) else index(found)
    except (TypeError, jax.errors.JAXTypeError):
        as_int = None
    if as_int is None:
        remedy = f"give {name} as a Python int, known before tracing"
        raise InputError(where, text(found), f"it must be a whole number{none}", remedy)
    if as_int < least:
        rule = f"it must be at least {least}{none}"
        raise InputError(where, found, rule, f"give {name} of {least} or more")
    if as_int > most:
        rule = f"it must be at most 2**{most.bit_length() - 1} = {most}{none}"
        raise InputError(where, found, rule, f"give a smaller {name}")
    object.__setattr__(value, name, as_int)


def text(value: Any) -> str:
    """Write a value for a message: an array as its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return repr(value)


class HashedOnce(tuple[T, ...]):
    """A tuple with a cached hash: hashing thousands of numbers would dominate a call's time."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)
