"""Applies `key=value` overrides to the values of a file, before anything is validated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from maxattn.config.document import Document, parse
from maxattn.config.errors import (
    ConfigErrors,
    Path,
    as_python,
    close,
    dotted,
    located,
    plain,
    refused,
)
from maxattn.config.fields import keys_of, section_type
from maxattn.config.numbers import DEEPEST
from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]


def apply(model: type[BaseModel], data: dict[str, Any], overrides: Overrides) -> dict[Path, str]:
    """Set what the overrides say, in their order, and return where each path was set.

    A name without a dot that is no key of the model goes to the one section that has it: `steps=20`
    sets `training.steps`.

    Args:
        model: the config class that will validate the result.
        data: the file's values; changed in place.
        overrides: `key=value`, keys dotted, values YAML; or values by key.

    Raises:
        ConfigErrors: for every override that means no key.
    """
    origins: dict[Path, str] = {}
    problems: list[ConfigError] = []
    for number, text in enumerate(texts(overrides), start=1):
        where = f"override {number}"
        try:
            path, value = _read(model, data, text, where)
            _put(data, path, value, where)
            origins[path] = where
        except ConfigErrors as error:
            problems += error.problems
    if problems:
        raise PartlyApplied(problems, origins)
    return origins


def texts(overrides: Overrides) -> list[str]:
    """Write overrides as `key=value`.

    Raises:
        ConfigErrors: they are neither a list of texts nor plain values by key.
    """
    if isinstance(overrides, Mapping):
        return [f"{key}={_as_yaml(str(key), value)}" for key, value in overrides.items()]
    if isinstance(overrides, str):
        rule, remedy = "they are a list of key=value", f'write ["{overrides}"]'
        raise refused("overrides", overrides, rule, remedy)
    if not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        rule = "they are a list of key=value, or a dict of values by key"
        raise refused("overrides", plain(overrides), rule, 'write ["attention=ring"]')
    return list(overrides)


def _as_yaml(key: str, value: Any) -> str:
    try:
        return json.dumps(value)  # which YAML reads as it is
    # ValueError: of an int of thousands of digits too.  RecursionError: of what is too deep.
    except (TypeError, ValueError, RecursionError):
        rule = "a value is text, a number, true, false, null, or a list or dict of them"
        raise refused(key, as_python(value), rule, "give a plain value") from None


class PartlyApplied(ConfigErrors):
    """Carry the overrides' problems, and where the applied ones set each path."""

    def __init__(self, problems: Sequence[ConfigError], origins: dict[Path, str]) -> None:
        self.origins = origins
        super().__init__(problems)


def _read(
    model: type[BaseModel], data: Mapping[str, Any], text: str, where: str
) -> tuple[Path, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    path = tuple(key.split("."))
    if not equals:
        rule, remedy = "an override is key=value", f"write {key or 'key'}=value"
        raise refused(key or "(nothing)", "(no value)", rule, remedy, where)
    if not all(path) or len(path) > DEEPEST:
        rule = "a key is names joined by dots"
        rule = f"{rule}, at most {DEEPEST}" if all(path) else rule
        raise refused(key or "(no key)", value, rule, "write key=value", where)
    document = _value(path, value, where)
    return _full_path(model, data, path, value, where), document.data


def _value(path: Path, value: str, where: str) -> Document:
    try:
        document = parse(value, lambda line: where)
    except ConfigErrors as error:
        raise refused(dotted(path), value, error.rule, error.remedy, where) from None
    if document.problems:
        raise ConfigErrors(located(problem, lambda _: where, path) for problem in document.problems)
    return document


def _full_path(
    model: type[BaseModel], data: Mapping[str, Any], path: Path, value: str, where: str
) -> Path:
    """Return the full path that an override means."""
    name = str(path[0])
    if name in model.model_fields:
        return path
    if name in PROGRAM_SECTIONS:
        _known_in_file(model, data, path, value, where)
        return path
    homes = [section for section, keys in _sections(model, data).items() if name in keys]
    if len(homes) > 1:
        rule = f"{' and '.join(homes)} both have a key '{name}'"
        choices = " or ".join(f"{home}.{dotted(path)}" for home in homes)
        raise refused(dotted(path), value, rule, f"write {choices}", where)
    return (*homes, *path)


def _sections(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Map each section of a program to its keys.

    They are the declared ones, or those of the file where the model declares no such section.
    """
    names = dict.fromkeys((*PROGRAM_SECTIONS, *model.model_fields))
    found = {n: _keys(model, data, n) for n in names if n != "flash_block_sizes"}
    return {name: keys for name, keys in found.items() if keys}


def _keys(model: type[BaseModel], data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    if name in model.model_fields:
        return keys_of(section_type(model.model_fields[name]))
    given = data.get(name)
    return tuple(map(str, given)) if isinstance(given, Mapping) else ()


def _known_in_file(
    model: type[BaseModel], data: Mapping[str, Any], path: Path, value: str, where: str
) -> None:
    """Refuse an override into a section that nobody here reads, unless the file has that key."""
    here: Any = data
    for depth, part in enumerate(path):
        if not isinstance(here, Mapping) or part not in here:
            section, key = f"{model.__name__} does not read the section '{path[0]}'", dotted(path)
            rule = f"{section}, and the file has no {key} in it"
            other = f"remove the override, or write {key} in the file"
            raise refused(key, value, rule, _closest(here, path[: depth + 1]) or other, where)
        here = here[part]


def _closest(here: Any, path: Path) -> str:
    beside = here if isinstance(here, Mapping) else ()
    return close(dotted(path), [dotted((*path[:-1], str(key))) for key in beside])


def _put(data: dict[str, Any], path: Path, value: Any, where: str) -> None:
    here = data
    for depth, part in enumerate(path[:-1], start=1):
        below = here.get(str(part))
        if below is not None and not isinstance(below, dict):
            above = dotted(path[:depth])
            rule = f"{above} is {plain(below)}, which has no keys"
            raise refused(dotted(path), plain(value), rule, f"write {above}=value", where)
        # A mapping may be shared through an alias, so it is copied on the way down.
        here[str(part)] = here = dict(below or {})
    here[str(path[-1])] = value
