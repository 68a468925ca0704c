"""Expected shapes of arrays, and errors for a data set whose arrays have others.

A form has one entry per axis: a number is that size, "L" any size, "2 h" any multiple of 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from maxattn.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of arrays by their names."""
Form = tuple[int | str, ...]


def fits(shape: tuple[int, ...], form: Form) -> bool:
    """Check whether a shape matches a form."""
    return len(shape) == len(form) and all(map(_size_fits, shape, form))


def _size_fits(size: int, wanted: int | str) -> bool:
    if isinstance(wanted, int):
        return size == wanted
    multiple, _, letter = wanted.partition(" ")
    return not letter or size % int(multiple) == 0


REMEDY = "make the folder anew with examples/make_latents.py, or train the model that it is for"


def shape_errors(shapes: Shapes, expected: Mapping[str, Form], model: str) -> Iterator[ConfigError]:
    """Yield one error for each array that is missing, unknown, or of another shape.

    Args:
        expected: the form of each array that the model takes.
    """
    for name in sorted(shapes.keys() | expected.keys()):
        if name not in shapes:
            rule = f"{model} needs {name} {_text(expected[name])}"
            yield _error(f"no {name}", rule)
        elif name not in expected:
            yield _error(f"{name} {list(shapes[name])}", f"{model} takes no {name}")
        elif not fits(shapes[name], expected[name]):
            rule = f"{model} takes {name} {_text(expected[name])}"
            yield _error(f"{name} {list(shapes[name])}", rule)


def _error(value: str, rule: str) -> ConfigError:
    return ConfigError("data.folder", value, rule, REMEDY)


def _text(form: Form) -> str:
    return f"[{', '.join(str(size).removeprefix('1 ') for size in form)}]"
