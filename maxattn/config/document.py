"""Reads YAML into plain values, and remembers on which line each of them was written.

It knows none of the keys. Only plain data is built, without the traps of YAML 1.1 and of bounded
size. Depth and nodes are counted while the text is read, and the nodes behind an alias each time
that it is named: a few hundred bytes of aliases can name billions of nodes.
"""

from __future__ import annotations

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
from maxattn.config.plain_json import read_bounded
from maxattn.errors import ConfigError

Where = Callable[[int], str]
MOST_BYTES: Final = 2**20
MOST_NODES: Final = 10_000  # keys and values, aliases written out; a model's config has hundreds
_TAG: Final = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Document:
    """A text's values, the nodes that know their lines, and its duplicate keys."""

    data: Any
    node: yaml.Node | None
    where: Where
    problems: tuple[ConfigError, ...] = ()

    def line_of(self, path: Path) -> tuple[int, int]:
        """Return (line, how many parts of the path were found); line 0 when none was."""
        node, line = self.node, 0
        for depth, part in enumerate(path):
            if isinstance(node, yaml.MappingNode):
                # The last of two equal keys is the one that counts.
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
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigErrors: it is missing, empty, no YAML, or holds something else than a mapping.
    """
    document = parse(_text(source), lambda line: f"{source}:{line}")
    if document.data is None:
        rule, remedy = "it holds at least one `key: value`", "write `attention: auto`"
        raise refused(source, "(empty)", rule, remedy)
    if not isinstance(document.data, dict):
        is_list = isinstance(document.data, list)
        kind, dash = ("a list", ", no dash before them") if is_list else ("a single value", "")
        rule = f"the file is a mapping of keys to values; this is {kind}"
        raise refused(source, show(document.data), rule, f"write `key: value` lines{dash}")
    return document


def parse(text: str, where: Where) -> Document:
    """Read one YAML document.

    Args:
        text: the YAML.
        where: turns a line number, from 1, into the place that errors name, such as `file:line`.

    Raises:
        ConfigErrors: it is no YAML, asks for more than plain data, or is too large or deep.
    """
    if len(text) > MOST_BYTES:
        raise _too_large("YAML", f"{len(text):,} characters", where(1))
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = tuple(_checked_keys(node, (), where, ())) if node else ()
        return Document(_built(loader, node, where) if node else None, node, where, problems)
    except _TooMuch as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise refused("YAML", error.value, error.rule, error.remedy, where(line)) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigErrors([_syntax(error, text, where)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        shown, rule = show(text[error.position]), "a character that YAML forbids"
        raise refused("YAML", shown, rule, "remove it", where(line)) from None


def _built(loader: _Loader, node: yaml.Node, where: Where) -> Any:
    try:
        return loader.construct_document(node)
    # `!!int abc`, `!!bool x`, `!!timestamp y`
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
        line = where(node.start_mark.line + 1)
        rule = "text after a tag such as !!int is of that kind"
        raise refused("YAML", "a tag", rule, "remove the tags", line) from None


# ---- the file ------------------------------------------------------------------------------------


def _text(source: str) -> str:
    try:
        return read_bounded(FilePath(source), MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"a config is text in UTF-8; byte {error.start} is not"
        raise refused(source, "not text", rule, "save the file as UTF-8") from None
    except ValueError as error:
        raise _too_large(source, str(error)) from None
    except FileNotFoundError:
        rule, path = "a config is a YAML file that exists", FilePath(source)
        raise refused(source, "not found", rule, _nearby(path.parent, path.name)) from None
    except IsADirectoryError:
        nearby = _nearby(FilePath(source), FilePath(source).name)
        raise refused(source, "a folder", "a config is a YAML file", nearby) from None
    except OSError as error:
        said = error.strerror or error
        rule = f"a config is a file that can be read, and the system says: {said}"
        remedy = "name another file, or mend its permissions"
        raise refused(source, "not readable", rule, remedy) from None


def _too_large(setting: str, value: str, where: str = "") -> ConfigErrors:
    remedy = "give a config, and not data or logs"
    return refused(setting, value, f"a config has at most {MOST_BYTES:,} bytes", remedy, where)


def _nearby(folder: FilePath, name: str) -> str:
    """Suggest a file of the folder, by likeness, else all of its YAML files."""
    is_there = os.path.isdir(folder)  # False also if it may not be looked at
    found = sorted(p.name for p in folder.glob("*.y*ml")) if is_there else []
    like = get_close_matches(name, found, n=1)
    if like:
        return f"did you mean '{folder / like[0]}'?"
    return f"name one of {', '.join(found)}" if found else f"there is no YAML file in '{folder}'"


# ---- keys ----------------------------------------------------------------------------------------


def _checked_keys(
    node: yaml.Node, path: Path, where: Where, above: tuple[yaml.Node, ...]
) -> Iterator[ConfigError]:
    """Make every key text (`on:` is "on"), and yield an error for each duplicate."""
    if any(node is outer for outer in above):
        rule, line = "an alias must not contain itself", node.start_mark.line + 1
        raise refused(dotted(path), "*alias", rule, "write the value out", where(line))
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
            also = "this line has it twice" if line == first else f"it is also on line {first}"
            text = value.value if isinstance(value, yaml.ScalarNode) else "..."
            name, rule = dotted((*path, str(key.value))), f"each key once; {also}"
            yield problem(name, text, rule, "remove one of the two", where(line))
        seen[str(key.value)] = line


# ---- syntax --------------------------------------------------------------------------------------

_ANYTHING = (
    "look for a bracket, a quote, a colon or an indentation that is off, here or one line above"
)
_PLAIN = "only plain values are read, and this tag makes something else"
_ALIGNED = (
    "one `key: value` a line, and keys that belong together aligned",
    "break the line, mend the indentation, or quote text that holds a colon",
)
_SYNTAX = (
    ("'\\t'", "YAML allows no tab here", "indent with spaces"),
    ("constructor", _PLAIN, "remove the tag"),
    ("another document", "one document a file", "remove the `---` between the two"),
    ("mapping values are not", *_ALIGNED),
)
"""Words of PyYAML's errors; the rule and the remedy in ours."""


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Where) -> ConfigError:
    mark, opened, said = error.problem_mark or error.context_mark, error.context_mark, error.problem
    line = mark.line if mark else 0
    lines = text.splitlines()
    if line >= len(lines) or "<stream end>" in (said or ""):
        line = opened.line if opened else line
        rule, remedy = "every bracket and quote is closed", "close the one that opens here"
    else:
        known = ((rule, remedy) for words, rule, remedy in _SYNTAX if words in (said or ""))
        rule, remedy = next(known, (said or "this is not YAML", _ANYTHING))
    shown = lines[line].strip() if line < len(lines) else "(end of file)"
    return problem("YAML", shown or "(empty line)", rule, remedy, where(line + 1))


# ---- the loader ----------------------------------------------------------------------------------


class _TooMuch(yaml.MarkedYAMLError):
    """A bound that a text goes beyond, and the remedy."""

    def __init__(self, value: str, rule: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(problem=rule, problem_mark=mark)
        self.value, self.rule, self.remedy = value, rule, remedy


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1 without its traps: 1e-3 is a number, and 010, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (the base class declares it so)

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._counts: dict[int, int] = {}  # of a node and all below it, by its id

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read one value with all below it, and count."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            self._add(self._counts.get(id(node), 1), f"*{event.anchor}", event.start_mark)
            return node
        before = self._count
        self._add(1, "...", event.start_mark)
        self._depth += 1
        if self._depth > DEEPEST:
            rule = f"lists and mappings are at most {DEEPEST} deep"
            raise _TooMuch("...", rule, "write it flatter", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._counts[id(node)] = self._count - before
        return node

    def _add(self, count: int, shown: str, mark: yaml.Mark) -> None:
        self._count += count
        if self._count > MOST_NODES:
            rule = f"at most {MOST_NODES:,} keys and values, what an alias stands for written out"
            raise _TooMuch(shown, rule, "leave out what attention does not need", mark)

    def construct_yaml_int(self, node: Any) -> int:
        """Return a whole number of bounded length; Python takes none of thousands of digits."""
        text = self.construct_scalar(node)
        if len(text) > LONGEST:
            rule = f"a whole number has at most {LONGEST} digits"
            remedy = "write a smaller one, or put it in quotes"
            raise _TooMuch(f"{text[:LONGEST]}...", rule, remedy, node.start_mark)
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
