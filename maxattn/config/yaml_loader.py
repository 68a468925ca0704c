"""The YAML that is read: plain data, without the traps of YAML 1.1, and of bounded size.

Depth and nodes are counted while the text is read, and what an alias stands for is counted each
time that it is named: a few hundred bytes of aliases can name billions of nodes.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from maxattn.config.numbers import DEEPEST, LONGEST

MOST_BYTES: Final = 2**20
MOST_NODES: Final = 10_000  # keys and values, aliases written out; a model's config has hundreds
INT: Final = "tag:yaml.org,2002:int"


class TooMuch(yaml.MarkedYAMLError):
    """Say which bound a text goes beyond, and what to do."""

    def __init__(self, value: str, rule: str, remedy: str, mark: yaml.Mark) -> None:
        super().__init__(problem=rule, problem_mark=mark)
        self.value, self.rule, self.remedy = value, rule, remedy


class Loader(yaml.SafeLoader):
    """Read YAML 1.1 without its traps: 1e-3 is a number, and 010, 1:30 and 2024-01-01 are text."""

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
        self._enter(event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._counts[id(node)] = self._count - before
        return node

    def _add(self, count: int, shown: str, mark: yaml.Mark) -> None:
        self._count += count
        if self._count > MOST_NODES:
            rule = f"at most {MOST_NODES:,} keys and values, what an alias stands for written out"
            raise TooMuch(shown, rule, "leave out what attention does not need", mark)

    def _enter(self, mark: yaml.Mark) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            rule = f"lists and mappings are at most {DEEPEST} deep"
            raise TooMuch("...", rule, "write it flatter", mark)

    def construct_yaml_int(self, node: Any) -> int:
        """Return a whole number of bounded length; Python takes none of thousands of digits."""
        text = self.construct_scalar(node)
        if len(text) > LONGEST:
            rule = f"a whole number has at most {LONGEST} digits"
            shown = f"{text[:LONGEST]}..."
            raise TooMuch(shown, rule, "write a smaller one, or put it in quotes", node.start_mark)
        return super().construct_yaml_int(node)


Loader.add_constructor(INT, Loader.construct_yaml_int)

_EXPONENT = r"[eE][-+]?\d+"
_FLOAT = (
    rf"[-+]?(?:\d[\d_]*(?:\.[\d_]*(?:{_EXPONENT})?|{_EXPONENT})"
    rf"|\.\d[\d_]*(?:{_EXPONENT})?|\.(?:inf|Inf|INF))"
)
_BOOL = r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)$"
for _tag, _pattern, _first in (
    ("bool", _BOOL, "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][\d_]*)$", "-+0123456789"),
    ("float", rf"(?:{_FLOAT}|\.(?:nan|NaN|NAN))$", "-+0123456789."),
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"<<$", "<"),
):
    _pattern = re.compile(_pattern, re.ASCII)
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
