"""The errors of maxattn: each names a setting, its value, the rule and the remedy.

This file raises no error, and depends on no other file of maxattn.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


class MaxattnError(Exception):
    """The base of all errors: a setting, its value, the rule that it breaks, and the remedy.

    Args:
        setting: the key, argument or axis with the wrong value, as the user wrote it.
        value: the wrong value.
        rule: the broken rule, in one sentence.
        remedy: what to do, in one sentence.
        where: `file:line` if the setting was read from a file, else "".
    """

    def __init__(
        self, setting: str, value: object, rule: str, remedy: str, where: str = ""
    ) -> None:
        self.setting, self.value, self.where = setting, value, where
        self.rule, self.remedy = rule, remedy
        location = f"{where}: " if where else ""
        what = f"{location}{setting}: {brief(value, str)}"
        super().__init__(escaped(f"{what}\n  rule    {rule}\n  remedy  {remedy}"))


class ConfigError(MaxattnError, ValueError):
    """A key or value in a YAML file, an override or a config object is wrong."""


class InputError(MaxattnError, ValueError):
    """A shape, dtype, mask or bias that was passed to attention is wrong."""


class MeshError(MaxattnError, ValueError):
    """A mesh axis is wrong, or a size that must divide evenly over a mesh axis."""


class WeightsError(MaxattnError, ValueError):
    """Files or tensors of weights do not fit the module that loads them."""


class Unsupported(MaxattnError, NotImplementedError):
    """The settings are valid, but this kernel, strategy or machine cannot compute the call."""


@dataclass(frozen=True)
class Reason:
    """Why a kernel or strategy refuses a call.

    Args:
        who: the kernel or context strategy that refuses.
        feature: the refused part of the call, in a word or two.
        rule: one sentence with the value and the limit.
        remedy: the change after which the call is not refused, or "".
    """

    who: str
    feature: str
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.who}: {self.rule}" + (f" ({self.remedy})" if self.remedy else "")


def escaped(text: str) -> str:
    """Escape characters that a terminal cannot print or would obey, but no line breaks.

    These are control characters, marks that turn the direction of text, and halves of characters.

    >>> print(escaped("a\\x9bb\\u202ec\\ud800"))
    a\\u009bb\\u202ec\\ud800
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


class EscapedStream:
    """A text stream that writes what `escaped` returns; `stream` writes codes for terminals."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(escaped(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def escaped_output() -> Iterator[None]:
    """Escape all output inside of the block, on both standard streams."""
    out: Any = EscapedStream(sys.stdout)
    err: Any = EscapedStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


def escape_record(record: logging.LogRecord) -> bool:
    """Escape the text of a log record, if it needs that; a filter that keeps every record."""
    if (text := escaped(record.getMessage())) != record.getMessage():
        record.msg, record.args = text, None
    return True


for _name in ("maxattn", "maxattn.measuring"):  # a filter is not inherited
    logging.getLogger(_name).addFilter(escape_record)


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word most similar to a word, ignoring case; "" if none is similar."""
    by_case = {name.casefold(): name for name in known}
    found = get_close_matches(word.casefold(), by_case, n=1)
    return by_case[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean '...'?" with the closest known word, or "" if none is close."""
    found = closest(word, known)
    return f"did you mean '{found}'?" if found else ""


def brief(value: object, write: Callable[[object], str] = repr) -> str:
    """Return a value as text; a huge int, which Python refuses to print, as its digit count."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    return write(value)
