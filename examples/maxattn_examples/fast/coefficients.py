"""Types of settings that are measured numbers: a curve's ratios, a polynomial's coefficients."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

Published = Literal["wan-2.1-t2v-1.3b", "wan-2.1-t2v-14b", "wan-2.1-i2v-480p", "wan-2.1-i2v-720p"]
Ratio = float | tuple[float, float]


def _broken(rule: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("maxattn", "{rule}", {"rule": rule, "remedy": remedy})


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int beyond the range of floats
        return False


def _are_ratios(value: Any) -> Any:
    """Refuse what is no list of positive numbers and pairs of them; the file of one is text."""
    rule = "each is a positive number, or a pair of them, and there is one for each step"
    remedy = "write those that were measured"
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, tuple):
        rule = "it is the YAML file of a curve, or a list of its ratios"
        raise _broken(rule, "name the file, or write the ratios that were measured")
    if not value:
        raise _broken(rule, remedy)
    for place, ratio in enumerate(value):
        pair: tuple[Any, ...] = ratio if isinstance(ratio, tuple) and len(ratio) == 2 else (ratio,)
        if not all(_is_finite(x) and x > 0 for x in pair):
            raise _broken(f"{rule}; that of step {place + 1} is {_shown(ratio)}", remedy)
    return value


def _is_polynomial(value: Any) -> Any:
    """Refuse what is neither a published model nor a list of finite coefficients."""
    known = get_args(Published)
    if value is None or (isinstance(value, str) and value in known):
        return value
    rule = f"it is one of {', '.join(known)}, or a list of coefficients"
    if not isinstance(value, tuple):
        raise _broken(rule, "write one of them, or coefficients such as [1, 0]")
    if not value:
        remedy = "write one or more, the highest power first, such as [1, 0]"
        raise _broken("a polynomial has a coefficient for each power", remedy)
    for place, number in enumerate(value):
        if not _is_finite(number):
            rule = f"each coefficient is a finite number; number {place + 1} is {_shown(number)}"
            raise _broken(rule, "write those that were measured")
    return value


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)[:40]


# What follows BeforeValidator is checked after it, and says the form to a schema.
Ratios = Annotated[tuple[Ratio, ...], BeforeValidator(_are_ratios)]
RatiosOrFile = Annotated[str | tuple[Ratio, ...] | None, BeforeValidator(_are_ratios)]
Polynomial = Annotated[Published | tuple[float, ...] | None, BeforeValidator(_is_polynomial)]
