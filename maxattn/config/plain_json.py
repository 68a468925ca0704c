"""Reads JSON that somebody else wrote, with its size and depth bounded before it is parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from maxattn.config.numbers import DEEPEST, LONGEST

MOST_BYTES: Final = 64 * 2**20  # the index of the largest models has about 10 MiB


def read_bounded(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file of at most so many bytes.

    Raises:
        OSError: as the system says; for a name that no file can have too.
        ValueError: it is larger.
    """
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except ValueError as error:  # a NUL in the name
        raise OSError(0, str(error)) from None
    if len(found) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return found


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        OSError: as the system says.
        ValueError: it is no JSON, too large or too deep, or says a key twice.
    """
    found = read_bounded(path, most)
    try:
        return parse_json(found.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is no text in UTF-8") from None


def parse_json(text: str) -> Any:
    """Read JSON text.

    Raises:
        ValueError: it is no JSON, too deep, has a number of too many digits, or says a key twice.
    """
    too_deep = f"its lists and mappings are more than {DEEPEST} deep"
    try:
        found = json.loads(text, object_pairs_hook=_each_once, parse_int=_bounded_int)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is no JSON, or cut off: {where}") from None
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [found]
    for _ in range(DEEPEST + 1):
        inner = (
            x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)
        )
        level = [value for values in inner for value in values]
    if level:
        raise ValueError(too_deep)
    return found


def _bounded_int(digits: str) -> int:
    if len(digits) > LONGEST:
        raise ValueError(f"it has a number of {len(digits)} digits")
    return int(digits)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"it says {twice[:80]!r} twice")
    return found
