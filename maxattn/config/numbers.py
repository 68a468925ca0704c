"""Checks the type, sign and size of numbers from files, overrides and command lines.

Booleans and text are no numbers. A wrong value gives None, and the caller raises the error.
"""

from __future__ import annotations

import re
from math import isfinite, isqrt
from typing import Any, Final

import numpy as np

LARGEST: Final = 2**31 - 1  # largest length, size or count, since positions are int32
MOST_DEVICES: Final = 2**20  # most devices on one axis of a mesh
LONGEST: Final = 40  # most digits of a number in a text
DEEPEST: Final = 64  # most levels of lists and mappings
_WHOLE = re.compile(r"[0-9]+", re.ASCII)


def whole(value: Any, least: int = 1, most: int = LARGEST) -> int | None:
    """Return a whole number (Python's or numpy's) within bounds as an int, else None.

    >>> whole(512), whole(True), whole("512"), whole(-3), whole(10**400)
    (512, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value) if least <= value <= most else None


def whole_in(text: str, least: int = 1, most: int = LARGEST) -> int | None:
    """Parse a text of only digits as a whole number; return None for other texts.

    >>> whole_in(" 512 "), whole_in("1e3"), whole_in("9" * 5000)
    (512, None, None)
    """
    digits = text.strip().lstrip("0") or text.strip()[-1:]
    if len(digits) > LONGEST or not _WHOLE.fullmatch(digits):
        return None
    return whole(int(digits), least, most)


def is_number(value: Any) -> bool:
    """Check whether a value is one real number, not text, a boolean or a tracer."""
    is_bool = str(getattr(value, "dtype", "")) == "bool"
    if isinstance(value, str | bytes | bool | complex) or is_bool:
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):  # a tracer's error is a TypeError
        return False
    return True


def finite(value: Any, least: float = float("-inf"), most: float = float("inf")) -> float | None:
    """Return a finite number (Python's or numpy's) within bounds as a float, else None.

    >>> finite(0.5), finite(True), finite(float("nan")), finite(10**400)
    (0.5, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int that exceeds the range of floats
        return None
    return number if isfinite(number) and least <= number <= most else None


def divisors(number: int, most: int = 64) -> list[int]:
    """List the smallest `most` divisors of a number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})[:most]
