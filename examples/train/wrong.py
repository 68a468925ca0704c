"""Compares the arrays of the data with those that a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from maxattn.errors import ConfigError

from .task import Shapes

MAKE = "make the folder anew with examples/make_latents.py, or train the model that it is for"


def unlike(
    shapes: Shapes, expected: Mapping[str, tuple[Any, ...]], whose: str
) -> Iterator[ConfigError]:
    """Yield one error for each array that lacks, is too many, or has another shape.

    Args:
        shapes: of one example's arrays.
        expected: what the model takes, by name, as `fits` reads it.
        whose: the model, in words.
    """
    for name in sorted(shapes.keys() | expected.keys()):
        if name not in shapes:
            rule = f"{whose} needs {name} {_text(expected[name])}"
            yield ConfigError("data.folder", f"no {name}", rule, MAKE)
        elif name not in expected:
            yield ConfigError(
                "data.folder", f"{name} {list(shapes[name])}", f"{whose} takes no {name}", MAKE
            )
        elif not fits(shapes[name], expected[name]):
            rule = f"{whose} takes {name} {_text(expected[name])}"
            yield ConfigError("data.folder", f"{name} {list(shapes[name])}", rule, MAKE)


def _text(form: tuple[Any, ...]) -> str:
    return f"[{', '.join(str(size).removeprefix('1 ') for size in form)}]"


def fits(shape: tuple[int, ...], form: tuple[Any, ...]) -> bool:
    """Tell whether a shape is of a form: a number is that size, "L" any, "2 h" any multiple of
    2.
    """
    return len(shape) == len(form) and all(map(_size_fits, shape, form))


def _size_fits(size: int, form: Any) -> bool:
    if isinstance(form, int):
        return size == form
    multiple, _, letter = form.partition(" ")
    return not letter or size % int(multiple) == 0
