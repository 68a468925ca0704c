"""Reads YAML text into plain values, and remembers on which line each of them was written.

It knows nothing of the keys. Only plain data is built: a tag such as `!!python/name` is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from maxattn.config.errors import ConfigErrors, Path, dotted, show
from maxattn.errors import ConfigError

Where = Callable[[int], str]
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """Read YAML 1.1 without its traps: 1e-3 is a number, and 010, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class declares it so)


_EXPONENT = r"[eE][-+]?\d+"
_FLOAT = (
    rf"[-+]?(?:\d[\d_]*(?:\.[\d_]*(?:{_EXPONENT})?|{_EXPONENT})"
    rf"|\.\d[\d_]*(?:{_EXPONENT})?|\.(?:inf|Inf|INF))"
)
for _tag, _pattern, _first in (
    (
        "bool",
        r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$",
        "yYnNtTfFoO",
    ),
    ("int", r"[-+]?(?:0|[1-9][\d_]*)$", "-+0123456789"),
    ("float", rf"(?:{_FLOAT}|\.(?:nan|NaN|NAN))$", "-+0123456789."),
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"<<$", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern, re.ASCII), list(_first)
    )


@dataclass(frozen=True)
class Document:
    """Hold what a text says: its values, the nodes that know their lines, and keys that are there
    twice.
    """

    data: Any
    node: yaml.Node | None
    where: Where
    problems: tuple[ConfigError, ...] = ()

    def line_of(self, path: Path) -> tuple[int, int]:
        """Return (line, how many parts of the path were found); line 0 when none was."""
        node, line = self.node, 0
        for depth, part in enumerate(path):
            child = _child(node, part)
            if child is None:
                return line, depth
            line, node = child
        return line, len(path)


def parse(text: str, where: Where) -> Document:
    """Read one YAML document.

    Args:
        text: the YAML.
        where: turns a line number, from 1, into the place that errors name.

    Raises:
        ConfigErrors: when it is no YAML, or asks for more than plain data.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = tuple(_checked_keys(node, (), where, ())) if node else ()
        return Document(_built(loader, node, where) if node else None, node, where, problems)
    except yaml.MarkedYAMLError as error:
        raise ConfigErrors([_syntax(error, text, where)]) from None
    except yaml.reader.ReaderError as error:
        raise ConfigErrors([_odd_character(error, text, where)]) from None


def _built(loader: _Loader, node: yaml.Node, where: Where) -> Any:
    try:
        return loader.construct_document(node)
    except (
        ValueError,
        LookupError,
        AttributeError,
        TypeError,
    ):  # `!!int abc`, `!!bool x`, `!!timestamp y`
        line = where(node.start_mark.line + 1)
        rule = "text after a tag such as !!int is of that kind"
        raise ConfigErrors([ConfigError("YAML", "a tag", rule, "remove the tags", line)]) from None


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # the last of two equal keys is the one that counts
            if key.value == part:
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line + 1, node.value[part]
    return None


def _checked_keys(
    node: yaml.Node, path: Path, where: Where, above: tuple[yaml.Node, ...]
) -> Iterator[ConfigError]:
    """Make every key text (`on:` is "on"), and yield an error for each that a mapping holds
    twice.
    """
    line = node.start_mark.line + 1
    if any(node is outer for outer in above):
        rule = "an alias must not contain itself"
        raise ConfigErrors(
            [ConfigError(dotted(path), "*alias", rule, "write the value out", where(line))]
        )
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            inner = (*path, str(key.value))
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _TEXT
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                yield _twice(inner, key, value, seen[key.value], where)
            seen[str(key.value)] = key.start_mark.line + 1
            yield from _checked_keys(value, inner, where, above)
    elif isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _checked_keys(item, (*path, place), where, above)


def _twice(path: Path, key: yaml.Node, value: yaml.Node, first: int, where: Where) -> ConfigError:
    text = value.value if isinstance(value, yaml.ScalarNode) else "..."
    line = key.start_mark.line + 1
    rule = (
        "each key once;"
        f" {'this line has it twice' if line == first else f'it is also on line {first}'}"
    )
    return ConfigError(dotted(path), text, rule, "remove one of the two", where(line))


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Where) -> ConfigError:
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    line = mark.line if mark else 0
    lines = text.splitlines()
    at_end = line >= len(lines) or "<stream end>" in (error.problem or "")
    if at_end and opened:
        line = opened.line
    shown = lines[line].strip() if line < len(lines) else "(end of file)"
    rule, remedy = _UNCLOSED if at_end else _in_our_words(error.problem or "this is not YAML")
    return ConfigError("YAML", shown or "(empty line)", rule, remedy, where(line + 1))


def _in_our_words(problem: str) -> tuple[str, str]:
    for words, rule, remedy in _SYNTAX:
        if words in problem:
            return rule, remedy
    return (
        problem,
        (
            "look for a bracket, a quote, a colon or an indentation that is off, here or one line"
            " above"
        ),
    )


_UNCLOSED = "every bracket and quote is closed", "close the one that opens here"
_SYNTAX = (
    ("'\\t'", "YAML allows no tab here", "indent with spaces"),
    (
        "constructor",
        "only plain values are read, and this tag makes something else",
        "remove the tag",
    ),
    ("another document", "one document a file", "remove the `---` between the two"),
    (
        "mapping values are not",
        "one `key: value` a line, and keys that belong together aligned",
        "break the line, mend the indentation, or quote text that holds a colon",
    ),
)


def _odd_character(error: yaml.reader.ReaderError, text: str, where: Where) -> ConfigError:
    line = text.count("\n", 0, error.position) + 1
    return ConfigError(
        "YAML",
        show(text[error.position]),
        "a character that YAML forbids",
        "remove it",
        where(line),
    )
