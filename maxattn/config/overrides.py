"""Applies `key=value` overrides to the values of a file, before anything is validated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from maxattn.config.document import Document, parse
from maxattn.config.errors import ConfigErrors, Path, close, dotted, located, plain, section_type
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
        ConfigErrors: for every override that has no place to go.
    """
    origins: dict[Path, str] = {}
    problems: list[ConfigError] = []
    for number, text in enumerate(texts(overrides), start=1):
        try:
            path, value = _read(model, data, text, f"override {number}")
            _put(data, path, value, f"override {number}")
            origins[path] = f"override {number}"
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
        raise _refused(
            "overrides", overrides, "they are a list of key=value", f'write ["{overrides}"]', ""
        )
    if not isinstance(overrides, Sequence) or not all(isinstance(text, str) for text in overrides):
        rule, remedy = (
            "they are a list of key=value, or a dict of values by key",
            'write ["attention=ring"]',
        )
        raise _refused("overrides", plain(overrides), rule, remedy, "")
    return list(overrides)


def _as_yaml(key: str, value: Any) -> str:
    try:
        return json.dumps(value)  # which YAML reads as it is
    except (TypeError, ValueError):
        rule = "a value is text, a number, true, false, null, or a list or dict of them"
        raise _refused(key, repr(value), rule, "give a plain value", "") from None


class PartlyApplied(ConfigErrors):
    """Carry the overrides' problems, and the places of those that were applied."""

    def __init__(self, problems: Sequence[ConfigError], origins: dict[Path, str]) -> None:
        self.origins = origins
        super().__init__(problems)


def _read(
    model: type[BaseModel], data: Mapping[str, Any], text: str, where: str
) -> tuple[Path, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    path = tuple(key.split("."))
    if not equals:
        raise _refused(
            key or "(nothing)",
            "(no value)",
            "an override is key=value",
            f"write {key or 'key'}=value",
            where,
        )
    if not all(path):
        raise _refused(
            key or "(no key)", value, "a key is names joined by dots", "write key=value", where
        )
    document = _value(path, value, where)
    return _placed(model, data, path, value, where), document.data


def _value(path: Path, value: str, where: str) -> Document:
    try:
        document = parse(value, lambda line: where)
    except ConfigErrors as error:
        raise _refused(dotted(path), value, error.rule, error.remedy, where) from None
    if document.problems:
        raise ConfigErrors(located(problem, lambda _: where, path) for problem in document.problems)
    return document


def _placed(
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
        choices = " or ".join(f"{home}.{dotted(path)}" for home in homes)
        raise _refused(
            dotted(path),
            value,
            f"{' and '.join(homes)} both have a key '{name}'",
            f"write {choices}",
            where,
        )
    return (homes[0], *path) if homes else path


def _sections(model: type[BaseModel], data: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Map each program section to its keys: the declared ones, or those of the file when the model
    declares none.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name in (*PROGRAM_SECTIONS, *(n for n in model.model_fields if n not in PROGRAM_SECTIONS)):
        field = model.model_fields.get(name)
        section = section_type(field) if field else None
        if section is not None and name != "flash_block_sizes":
            found[name] = tuple(section.model_fields)
        elif field is None and isinstance(data.get(name), Mapping):
            found[name] = tuple(map(str, data[name]))
    return found


def _known_in_file(
    model: type[BaseModel], data: Mapping[str, Any], path: Path, value: str, where: str
) -> None:
    """Refuse an override into a section that nobody here reads, unless the file has that very
    key.
    """
    here: Any = data
    for depth, part in enumerate(path, start=1):
        if not isinstance(here, Mapping) or part not in here:
            beside = (
                [dotted((*path[: depth - 1], str(key))) for key in here]
                if isinstance(here, Mapping)
                else []
            )
            rule = (
                f"{model.__name__} does not read the section '{path[0]}', and the file has no"
                f" {dotted(path)} in it"
            )
            remedy = (
                close(dotted(path[:depth]), beside)
                or f"remove the override, or write {dotted(path)} in the file"
            )
            raise _refused(dotted(path), value, rule, remedy, where)
        here = here[part]


def _put(data: dict[str, Any], path: Path, value: Any, where: str) -> None:
    here = data
    for depth, part in enumerate(path[:-1], start=1):
        below = here.get(str(part))
        if below is not None and not isinstance(below, dict):
            rule = f"{dotted(path[:depth])} is {plain(below)}, which has no keys"
            raise _refused(
                dotted(path), plain(value), rule, f"write {dotted(path[:depth])}=value", where
            )
        # A mapping may be shared through an alias, so it is copied on the way down.
        here[str(part)] = here = dict(below or {})
    here[str(path[-1])] = value


def _refused(setting: str, value: str, rule: str, remedy: str, where: str) -> ConfigErrors:
    return ConfigErrors([ConfigError(setting, value, rule, remedy, where)])
