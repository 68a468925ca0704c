"""Errors of a config: setting, value, rule, remedy, and the file and line where it was written.

`translate.py` makes them of what pydantic found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from maxattn.errors import ConfigError, did_you_mean

Path = tuple[str | int, ...]
Locate = Callable[[Path], str]
LONGEST = 80  # characters of a value that an error shows
MOST_TEXT = 1000  # characters of a rule, a remedy, or a key with its path


class ConfigErrors(ConfigError):
    """Report every problem of one config at once.

    Args:
        problems: at least one; the attributes of the error are those of the first.
        source: the file, for the headline over several problems.
    """

    def __init__(self, problems: Iterable[ConfigError], source: str = "") -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.setting, first.value, first.rule, first.remedy, first.where)
        if len(self.problems) > 1:
            headline = f"{source or 'config'}: {len(self.problems)} problems"
            self.args = ("\n".join((headline, *map(str, self.problems))),)


def problem(setting: str, value: str, rule: str, remedy: str, where: str = "") -> ConfigError:
    """Make an error; what a file says at length is shortened."""
    setting, rule, remedy = (printable(text, MOST_TEXT) for text in (setting, rule, remedy))
    return ConfigError(setting, printable(value), rule, remedy, where)


def refused(setting: str, value: str, rule: str, remedy: str, where: str = "") -> ConfigErrors:
    """Make the error of one problem."""
    return ConfigErrors([problem(setting, value, rule, remedy, where)])


def located(found: ConfigError, locate: Locate, prefix: Path = ()) -> ConfigError:
    """Return a problem with its location and its full dotted key."""
    path: Path = (*prefix, *found.setting.split("."))
    where = found.where or locate(path)
    return problem(dotted(path), str(found.value), found.rule, found.remedy, where)


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as the user would: `flash_block_sizes.block_q`, `mesh_axes[2]`."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p or '(no name)'}" for p in path)
    return "".join(parts).removeprefix(".")


def close(word: str, known: Iterable[str]) -> str:
    """Name the closest known word as a question, ignoring case; nothing when none is close."""
    known = list(known)
    same = [name for name in known if name.casefold() == word.casefold()]
    return f"did you mean '{same[0]}'?" if same else did_you_mean(word, known)


def plain(value: object) -> str:
    """Write a value as YAML would, text without quotes: where it cannot be mistaken."""
    return printable(value) if isinstance(value, str) and value else show(value)


def show(value: object) -> str:
    """Write a value as YAML would, shortened: text in quotes, so that "512" and 512 differ."""
    try:
        return _short(json.dumps(value, ensure_ascii=False, default=str))
    # A value that holds itself, is too deep, or is an int of thousands of digits.
    except (TypeError, ValueError, RecursionError):
        return as_python(value)


def as_python(value: object) -> str:
    """Write a value as Python would, shortened; only its kind where that cannot be written."""
    try:
        return _short(repr(value))
    except (ValueError, RecursionError):
        return f"({type(value).__name__}, too long to show)"


def _short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def printable(text: str, most: int = LONGEST) -> str:
    """Shorten a text, and write what cannot be printed, such as a NUL, as JSON does."""
    odd = "" if text.isprintable() else json.dumps(text[:most], ensure_ascii=False)
    return _short(odd or text, most)
