"""Checks sizes that a `config.json` says by the types of the dataclass that holds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from maxattn.errors import WeightsError

Sizes = TypeVar("Sizes")
AGAIN = "fetch the folder again"
MOST = 10**6


def checked(kind: Callable[..., Sizes], config: Mapping[str, Any], usual: Any) -> Sizes:
    """Make sizes from the values of a file.

    Args:
        kind: a dataclass, with `misfits()`.
        config: the file's settings by name.
        usual: values of what the file may leave out, by name.

    Raises:
        WeightsError: a size is not there or of another type, or sizes do not fit each other.
    """
    types, values = get_type_hints(kind), {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name not in config and field.name not in usual:
            rule = f"{field.name} is required: diffusers' default is another model's"
            raise WeightsError("config.json", f"without {field.name}", rule, AGAIN)
        value = size_of(config, field.name, types[field.name], usual.get(field.name))
        values[field.name] = tuple(value) if isinstance(value, list) else value
    found: Any = kind(**values)
    for misfit in found.misfits():
        raise WeightsError(misfit.setting, misfit.value, misfit.rule, AGAIN)
    return found


def size_of(config: Mapping[str, Any], key: str, wanted: Any, usual: Any) -> Any:
    """Return one size of a file, or the usual one.

    Raises:
        WeightsError: it is of another type.
    """
    if not _is(value := config.get(key, usual), wanted):
        raise WeightsError(key, repr(value), f"it is {_words(wanted)}", AGAIN)
    return value


def _is(value: Any, wanted: Any) -> bool:
    """Check whether a value of JSON has a type; sizes are positive."""
    if wanted is int:
        return type(value) is int and 0 < value <= MOST
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    if get_origin(wanted) is tuple:
        return _is_list(value, get_args(wanted))
    if NoneType in get_args(wanted):
        return value is None or any(_is(value, each) for each in get_args(wanted))
    return type(value) is wanted


def _is_list(value: Any, wanted: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    each = wanted[:1] * len(value) if wanted[-1] is ... else wanted
    return len(each) == len(value) and all(map(_is, value, each))


def _words(wanted: Any) -> str:
    said = {
        int: f"a whole number from 1 to {MOST:,}",
        float: "a number above 0",
        bool: "true or false",
    }
    if get_origin(wanted) is tuple:
        each = get_args(wanted)
        many = f"whole numbers from 1 to {MOST:,}" if each[0] is int else "names"
        return f"a list of {many}" if each[-1] is ... else f"a list of {len(each)} {many}"
    if NoneType in get_args(wanted):
        return f"{_words(next(x for x in get_args(wanted) if x is not NoneType))}, or null"
    return said.get(wanted, "a text")
