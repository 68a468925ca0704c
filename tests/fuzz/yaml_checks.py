"""Reads YAML by PyYAML's plain events, and holds a config that was accepted to what they say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tests.fuzz.case import Names, Wrong

SECTIONS = ("model", "data", "training", "sampling")
SPELLED = {True: "true", False: "false", None: "null"}


def check_of(data: bytes, ours: bool) -> Callable[[Names], None]:
    """Return the check of a config that was accepted; of another project's, that it is YAML."""

    def check(names: Names) -> None:
        pairs = _pairs(data)
        if ours:
            _check_keys(pairs, names["config"])

    return check


def _pairs(data: bytes) -> list[tuple[Any, Any]]:
    """Return keys and values of the top mapping, in order, twice where they stand twice."""
    import yaml

    try:
        node = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise Wrong(f"accepted, and it is no YAML: {error}") from None
    if not isinstance(node, yaml.MappingNode):
        raise Wrong(f"accepted, and it is no mapping but {type(node).__name__}")
    return [(key, value) for key, value in node.value]


def _check_keys(pairs: list[tuple[Any, Any]], config: Any) -> None:
    names = [key.value for key, _ in pairs]
    if repeated := {str(name) for name in names if names.count(name) > 1}:
        raise Wrong(f"accepted, and these keys stand twice: {repeated}")
    for key, value in pairs:
        if key.value in SECTIONS:
            continue
        if key.value not in type(config).model_fields:
            raise Wrong(f"accepted, and there is no key {key.value!r}", "print(config)")
        _check_value(key.value, _plain(value), getattr(config, key.value))


def _plain(node: Any) -> Any:
    import yaml

    loader = yaml.SafeLoader("")
    try:
        return loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise Wrong(f"accepted, and a value is none: {str(error)[:100]}") from None


def _check_value(key: str, written: Any, held: Any) -> None:
    """Hold one setting to what is written: the same type, and no NaN."""
    if key == "flash_block_sizes":
        written = written or {}
        for name, size in written.items():
            _check_value(f"{key}.{name}", size, getattr(held, name))
        return
    if isinstance(written, list):
        written, held = tuple(written), tuple(held)
    same = written == held and type(written) is type(held)
    if not same or (isinstance(held, float) and math.isnan(held)):
        raise Wrong(
            f"{key} is written {str(written)[:60]!r} and read {held!r}", f"print(config.{key})"
        )
