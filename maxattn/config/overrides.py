"""Applies `key=value` overrides to the values of a file, before anything is validated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from maxattn.config.document import parse
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


def apply_overrides(
    model: type[BaseModel], data: dict[str, Any], overrides: Overrides
) -> tuple[dict[Path, str], list[ConfigError]]:
    """Apply overrides in their order; return where each path was set, and what is wrong.

    A name without a dot that is no key of the model goes to the one section that has it: `steps=20`
    sets `training.steps`.

    Args:
        model: the config class that will validate the result.
        data: the file's values; changed in place.
        overrides: `key=value`, keys dotted, values YAML; or values by key.
    """
    origins: dict[Path, str] = {}
    problems: list[ConfigError] = []
    try:
        texts = _texts(overrides)
    except ConfigErrors as error:
        return origins, list(error.problems)
    for number, text in enumerate(texts, start=1):
        where = f"override {number}"
        try:
            path, value = _read(model, data, text, where)
            _put(data, path, value, where)
            origins[path] = where
        except ConfigErrors as error:
            problems += error.problems
    return origins, problems


def _texts(overrides: Overrides) -> list[str]:
    """Write overrides as `key=value`."""
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


def _read(
    model: type[BaseModel], data: Mapping[str, Any], text: str, where: str
) -> tuple[Path, Any]:
    """Return the full path of an override, and its value."""
    key, equals, value = (part.strip() for part in text.partition("="))
    path: Path = tuple(key.split("."))
    if not equals:
        rule, remedy = "an override is key=value", f"write {key or 'key'}=value"
        raise refused(key or "(nothing)", "(no value)", rule, remedy, where)
    if not all(path) or len(path) > DEEPEST:
        rule = "a key is names joined by dots"
        rule = f"{rule}, at most {DEEPEST}" if all(path) else rule
        raise refused(key or "(no key)", value, rule, "write key=value", where)
    try:
        document = parse(value, lambda line: where)
    except ConfigErrors as error:
        raise refused(key, value, error.rule, error.remedy, where) from None
    if document.problems:
        raise ConfigErrors(located(problem, lambda _: where, path) for problem in document.problems)

    name = str(path[0])
    if name in PROGRAM_SECTIONS and name not in model.model_fields:
        _check_in_file(model, data, path, value, where)
    elif name not in model.model_fields:
        homes = [section for section, keys in _sections(model, data).items() if name in keys]
        if len(homes) > 1:
            rule = f"{' and '.join(homes)} both have a key '{name}'"
            choices = " or ".join(f"{home}.{key}" for home in homes)
            raise refused(key, value, rule, f"write {choices}", where)
        path = (*homes, *path)
    return path, document.data


def _sections(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the keys of each section: the declared ones, else those of the file."""
    found = {}
    for name in dict.fromkeys((*PROGRAM_SECTIONS, *model.model_fields)):
        given = data.get(name)
        if name in model.model_fields:
            found[name] = keys_of(section_type(model.model_fields[name]))
        elif isinstance(given, Mapping):
            found[name] = tuple(map(str, given))
    return {name: keys for name, keys in found.items() if name != "flash_block_sizes"}


def _check_in_file(
    model: type[BaseModel], data: Mapping[str, Any], path: Path, value: str, where: str
) -> None:
    """Refuse an override into a section that nobody here reads, unless the file has that key."""
    here: Any = data
    for depth, part in enumerate(path):
        if not isinstance(here, Mapping) or part not in here:
            section, key = f"{model.__name__} does not read the section '{path[0]}'", dotted(path)
            rule = f"{section}, and the file has no {key} in it"
            beside = here if isinstance(here, Mapping) else ()
            known = [dotted((*path[:depth], str(other))) for other in beside]
            guess = close(dotted(path[: depth + 1]), known)
            remedy = guess or f"remove the override, or write {key} in the file"
            raise refused(key, value, rule, remedy, where)
        here = here[part]


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
