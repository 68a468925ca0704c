"""Forms of arrays, and whether a shape has one.

A form has one entry an axis: a number is that size, "L" any size, "2 h" any multiple of 2.
"""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by their names."""
Form = tuple[int | str, ...]


def fits(shape: tuple[int, ...], form: Form) -> bool:
    """Check whether a shape has a form."""
    return len(shape) == len(form) and all(map(_size_fits, shape, form))


def _size_fits(size: int, wanted: int | str) -> bool:
    if isinstance(wanted, int):
        return size == wanted
    multiple, _, letter = wanted.partition(" ")
    return not letter or size % int(multiple) == 0
