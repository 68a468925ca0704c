"""Reads YAML into plain values and records the line of each value; reads JSON.

Only plain data of bounded size is read; `_Loader` lists where it differs from YAML 1.1. The loader
limits depth and the number of nodes. It counts an alias's nodes at each use, because a few hundred
bytes of aliases can expand to billions of nodes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import Any, Final

import yaml

from maxattn.config.errors import ConfigErrors, Path, dotted, problem, refused, show
from maxattn.config.numbers import DEEPEST, LONGEST
from maxattn.errors import ConfigError

Where = Callable[[int], str]
MOST_BYTES: Final = 2**20
MOST_JSON: Final = 64 * 2**20  # most bytes of JSON; an index of a large model's weights has 10 MiB
MOST_NODES: Final = 10_000  # most keys and values, with aliases expanded; a config has hundreds
_TAG: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """The values of a YAML text, its nodes with lines, and errors for duplicate keys."""

    data: Any
    node: yaml.Node | None
    where: Where
    problems: tuple[ConfigError, ...] = ()

    def line_of(self, path: Path) -> tuple[int, int]:
        """Return (line of a key, number of its path's parts in the text); line 0 if it has none."""
        node, line = self.node, 0
        for depth, part in enumerate(path):
            if isinstance(node, yaml.MappingNode):
                # If a key occurs several times, the last one counts.
                pairs = [pair for pair in node.value if pair[0].value == part][-1:]
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
                pairs = [(item, item) for item in node.value[part : part + 1]]
            else:
                pairs = []
            if not pairs:
                return line, depth
            line, node = pairs[0][0].start_mark.line + 1, pairs[0][1]
        return line, len(path)


def read(source: str) -> Document:
    """Read a YAML file; refuse one that is missing, empty, or no mapping at its top level."""
    document = parse(_text(source), lambda line: f"{source}:{line}")
    if document.data is None:
        rule = "a config must have at least one `key: value` line"
        raise refused(source, "(empty)", rule, "write `attention: auto`")
    if not isinstance(document.data, dict):
        is_list = isinstance(document.data, list)
        kind, dash = ("a list", ", without dashes") if is_list else ("a single value", "")
        rule = f"a config must be a mapping of keys to values, and this file is {kind}"
        raise refused(source, show(document.data), rule, f"write `key: value` lines{dash}")
    return document


def parse(text: str, where: Where) -> Document:
    """Parse one YAML document of plain data; `where` turns a line number into a location."""
    if len(text) > MOST_BYTES:
        raise _too_large("YAML", f"{len(text):,} characters", where(1))
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = tuple(_checked_keys(node, (), where, ())) if node else ()
        data = loader.construct_document(node) if node else None
        return Document(data, node, where, problems)
    except _Refused as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise refused("YAML", error.value, error.rule, error.remedy, where(line)) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigErrors([_syntax(error, text, where)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        shown, rule = show(text[error.position]), "YAML forbids this character"
        raise refused("YAML", shown, rule, "remove it", where(line)) from None


# ---- the file ------------------------------------------------------------------------------------


def _text(source: str) -> str:
    try:
        return read_bounded(FilePath(source), MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"a config must be UTF-8 text, and byte {error.start} is not valid UTF-8"
        raise refused(source, "not text", rule, "save the file as UTF-8") from None
    except ValueError as error:
        raise _too_large(source, str(error)) from None
    except FileNotFoundError:
        rule, path = "a config must be a YAML file that exists", FilePath(source)
        raise refused(source, "not found", rule, _nearby(path.parent, path.name)) from None
    except IsADirectoryError:
        nearby = _nearby(FilePath(source), FilePath(source).name)
        raise refused(source, "a folder", "a config must be a YAML file", nearby) from None
    except OSError as error:
        rule = f"a config must be readable, and the system reports: {error.strerror or error}"
        remedy = "name another file, or change its permissions"
        raise refused(source, "not readable", rule, remedy) from None


def _too_large(setting: str, value: str, where: str = "") -> ConfigErrors:
    rule = f"a config must have at most {MOST_BYTES:,} bytes"
    return refused(setting, value, rule, "pass a config, not a file of data or logs", where)


def _nearby(folder: FilePath, name: str) -> str:
    """Suggest the folder's YAML file with the closest name, else all its YAML files."""
    is_there = os.path.isdir(folder)  # False also for a folder without permission
    found = sorted(p.name for p in folder.glob("[!.]*.y*ml")) if is_there else []
    like = get_close_matches(name, found, n=1)
    if like:
        return f"did you mean '{folder / like[0]}'?"
    return f"name one of {', '.join(found)}" if found else f"name a YAML file; '{folder}' has none"


# ---- keys ----------------------------------------------------------------------------------------


def _checked_keys(
    node: yaml.Node, path: Path, where: Where, above: tuple[yaml.Node, ...]
) -> Iterator[ConfigError]:
    """Turn every key into text (`on:` becomes "on"), and yield an error for each duplicate."""
    if any(node is outer for outer in above):
        rule, line = "an alias must not contain itself", node.start_mark.line + 1
        raise refused(dotted(path), "*alias", rule, "write a value in its place", where(line))
    above = (*above, node)
    if isinstance(node, yaml.MappingNode):
        yield from _duplicates(node, path, where)
        for key, value in node.value:
            yield from _checked_keys(value, (*path, str(key.value)), where, above)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _checked_keys(item, (*path, index), where, above)


def _duplicates(node: yaml.MappingNode, path: Path, where: Where) -> Iterator[ConfigError]:
    seen: dict[str, int] = {}
    for key, value in node.value:
        is_scalar, line = isinstance(key, yaml.ScalarNode), key.start_mark.line + 1
        if is_scalar and key.tag != f"{_TAG}merge":
            key.tag = f"{_TAG}str"
        if is_scalar and key.value in seen:
            first = seen[key.value]
            also = "this line has it twice" if line == first else f"line {first} has it too"
            text = value.value if isinstance(value, yaml.ScalarNode) else "..."
            name, rule = dotted((*path, str(key.value))), f"a key must occur only once, and {also}"
            yield problem(name, text, rule, "remove one of the two keys", where(line))
        seen[str(key.value)] = line


# ---- syntax --------------------------------------------------------------------------------------

_ANYTHING = "check brackets, quotes, colons and indentation, on this line and the line above"
_SYNTAX = (
    ("'\\t'", "YAML allows no tab here", "indent with spaces"),
    (
        "constructor",
        "a config must have only plain values, and this tag creates another object",
        "remove the tag",
    ),
    ("another document", "a file must have only one document", "remove this line and all below"),
    (
        "mapping values are not",
        "a line must have one `key: value`, and a mapping's keys must be equally indented",
        "break the line, correct the indentation, or quote text that has a colon",
    ),
)
"""(words of PyYAML's error, our rule, our remedy)."""


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Where) -> ConfigError:
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    message = error.problem or ""
    line = mark.line if mark else 0
    lines = text.splitlines()
    if line >= len(lines) or "<stream end>" in message:
        line = opened.line if opened else line
        rule, remedy = "every bracket and quote must be closed", "close the one opened here"
    else:
        known = ((rule, remedy) for words, rule, remedy in _SYNTAX if words in message)
        rule, remedy = next(known, (message or "this is not YAML", _ANYTHING))
    shown = lines[line].strip() if line < len(lines) else "(end of file)"
    return problem("YAML", shown or "(empty line)", rule, remedy, where(line + 1))


# ---- the loader ----------------------------------------------------------------------------------


class _Refused(yaml.MarkedYAMLError):
    """Raised if the text exceeds a limit, or if a value does not fit its tag."""

    def __init__(self, value: str, rule: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(problem=rule, problem_mark=mark)
        self.value, self.rule, self.remedy = value, rule, remedy


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1, except that 1e-3 is a number, and 010, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class declares it so)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._counts: dict[int, int] = {}  # number of nodes in the subtree of each node, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one value and its subtree, and count the nodes."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            self._add(self._counts.get(id(node), 1), f"*{event.anchor}", event.start_mark)
            return node
        before = self._count
        self._add(1, "...", event.start_mark)
        self._depth += 1
        if self._depth > DEEPEST:
            rule = f"lists and mappings must be nested at most {DEEPEST} levels deep"
            raise _Refused("...", rule, "use fewer levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._counts[id(node)] = self._count - before
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Return the value of a node; refuse text that does not fit its tag: `!!int abc`."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
            rule = "a value after a tag such as !!int must have that type"
            raise _Refused("a tag", rule, "remove the tag", node.start_mark) from None

    def _add(self, count: int, shown: str, mark: yaml.Mark) -> None:
        self._count += count
        if self._count > MOST_NODES:
            rule = f"a config must expand to at most {MOST_NODES:,} keys and values"
            raise _Refused(shown, rule, "leave out keys that attention does not need", mark)

    def construct_yaml_int(self, node: Any) -> int:
        """Return a whole number; refuse more than `LONGEST` digits (Python refuses thousands)."""
        text = self.construct_scalar(node)
        if len(text) > LONGEST:
            rule = f"a whole number must have at most {LONGEST} digits"
            remedy = "write a smaller number, or put it in quotes if it is text"
            raise _Refused(f"{text[:LONGEST]}...", rule, remedy, node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_yaml_int)

_EXPONENT = r"[eE][-+]?\d+"
_FLOAT = (
    rf"[-+]?(?:\d[\d_]*(?:\.[\d_]*(?:{_EXPONENT})?|{_EXPONENT})"
    rf"|\.\d[\d_]*(?:{_EXPONENT})?|\.(?:inf|Inf|INF))"
)
_BOOL = r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$"
for _kind, _pattern, _first in (
    ("bool", _BOOL, "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][\d_]*)$", "-+0123456789"),
    ("float", rf"(?:{_FLOAT}|\.(?:nan|NaN|NAN))$", "-+0123456789."),
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"<<$", "<"),
):
    _pattern = re.compile(_pattern, re.ASCII)
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, list(_first))


# ---- bytes and JSON ------------------------------------------------------------------------------


def read_bounded(path: FilePath, most: int = MOST_JSON) -> bytes:
    """Read a file; raise OSError if it is unreadable, ValueError if it exceeds `most` bytes."""
    try:
        with path.open("rb") as file:
            found = file.read(most + 1)
    except ValueError as error:  # a NUL in the path
        raise OSError(0, str(error)) from None
    if len(found) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return found


def read_json(path: FilePath, most: int = MOST_JSON) -> Any:
    """Read a JSON file; raise OSError if it is unreadable, ValueError if it is not valid JSON."""
    found = read_bounded(path, most)
    try:
        return parse_json(found.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


def parse_json(text: str) -> Any:
    """Parse JSON; raise ValueError if it is invalid, nested too deep, or has a key twice."""
    too_deep = f"its lists and mappings are nested more than {DEEPEST} levels deep"
    try:
        found = json.loads(text, object_pairs_hook=_each_once, parse_int=_bounded_int)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"it is not valid JSON at {where}") from None
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
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return found
