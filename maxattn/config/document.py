"""Reads YAML text into plain values, and remembers on which line each of them was written.

It knows nothing of the keys. Only plain data is built: a tag such as `!!python/name` is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from maxattn.config.errors import ConfigErrors, Path, dotted, problem, refused, show
from maxattn.config.yaml_loader import MOST_BYTES, Loader, TooMuch
from maxattn.errors import ConfigError

Where = Callable[[int], str]
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class Document:
    """Hold what a text says: values, the nodes that know their lines, and duplicate keys."""

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
        where: turns a line number, from 1, into what errors name, such as `file:line`.

    Raises:
        ConfigErrors: when it is no YAML, asks for more than plain data, or is too large or deep.
    """
    if len(text) > MOST_BYTES:
        raise too_large("YAML", f"{len(text):,} characters", where(1))
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        problems = tuple(_checked_keys(node, (), where, ())) if node else ()
        return Document(_built(loader, node, where) if node else None, node, where, problems)
    except TooMuch as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise refused("YAML", error.value, error.rule, error.remedy, where(line)) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigErrors([_syntax(error, text, where)]) from None
    except yaml.reader.ReaderError as error:
        raise ConfigErrors([_odd_character(error, text, where)]) from None


def _built(loader: Loader, node: yaml.Node, where: Where) -> Any:
    try:
        return loader.construct_document(node)
    # `!!int abc`, `!!bool x`, `!!timestamp y`
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError):
        line = where(node.start_mark.line + 1)
        rule = "text after a tag such as !!int is of that kind"
        raise refused("YAML", "a tag", rule, "remove the tags", line) from None


def too_large(setting: str, value: str, where: str = "") -> ConfigErrors:
    """Refuse a text beyond what is read."""
    remedy = "give a config, and not data or logs"
    return refused(setting, value, f"a config has at most {MOST_BYTES:,} bytes", remedy, where)


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
    first: dict[str, int] = {}
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            key.tag = _TEXT
        if isinstance(key, yaml.ScalarNode) and key.value in first:
            yield _twice((*path, str(key.value)), key, value, first[key.value], where)
        first[str(key.value)] = key.start_mark.line + 1


def _twice(path: Path, key: yaml.Node, value: yaml.Node, first: int, where: Where) -> ConfigError:
    text = value.value if isinstance(value, yaml.ScalarNode) else "..."
    line = key.start_mark.line + 1
    also = "this line has it twice" if line == first else f"it is also on line {first}"
    return problem(
        dotted(path), text, f"each key once; {also}", "remove one of the two", where(line)
    )


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Where) -> ConfigError:
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    line = mark.line if mark else 0
    lines = text.splitlines()
    at_end = line >= len(lines) or "<stream end>" in (error.problem or "")
    if at_end and opened:
        line = opened.line
    shown = lines[line].strip() if line < len(lines) else "(end of file)"
    rule, remedy = _UNCLOSED if at_end else _in_our_words(error.problem or "this is not YAML")
    return problem("YAML", shown or "(empty line)", rule, remedy, where(line + 1))


def _in_our_words(problem: str) -> tuple[str, str]:
    said = (told for words, *told in _SYNTAX if words in problem)
    rule, remedy = next(said, (problem, _ANYTHING))
    return rule, remedy


_UNCLOSED = "every bracket and quote is closed", "close the one that opens here"
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


def _odd_character(error: yaml.reader.ReaderError, text: str, where: Where) -> ConfigError:
    line = text.count("\n", 0, error.position) + 1
    shown = show(text[error.position])
    return problem("YAML", shown, "a character that YAML forbids", "remove it", where(line))
