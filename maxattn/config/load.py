"""Loads a config (reads YAML, applies overrides, validates), and writes a config as YAML.

One error reports every problem, with its file and line or the number of its override.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from maxattn.config.document import Document, parse, read
from maxattn.config.errors import ConfigErrors, Path, dotted, keys_of, located, plain, refused, show
from maxattn.config.numbers import DEEPEST
from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.config.section import Section, problems_of
from maxattn.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from maxattn.config.settings import AttentionConfig

Config = TypeVar("Config", bound=Section)
Overrides = Sequence[str] | Mapping[str, Any]


def load(model: type[Config], path: str | os.PathLike[str] | None, overrides: Overrides) -> Config:
    """Read a file (none if `path` is None), apply overrides, and validate; report every problem."""
    source = "" if path is None else os.fspath(path)
    document = Document({}, None, str) if path is None else read(source)
    data = dict(document.data)
    origins, problems = apply_overrides(model, data, overrides)
    locate = Locations(document, source, origins)
    values, wrong_sections = _without_program_sections(model, data, locate)
    problems = [*document.problems, *problems, *wrong_sections]
    config, wrong_values = validated(model, values, locate)
    if config is not None and not problems:
        return config
    problems = sorted([*problems, *wrong_values], key=in_file_order)
    problems = _of_another_program(model, document.data, source, problems)
    raise ConfigErrors(problems, source or "overrides")


def validated(
    model: type[Config], values: Mapping[str, Any], locate: Locations
) -> tuple[Config | None, list[ConfigError]]:
    """Validate values: return (config, []) or (None, problems)."""
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        return None, problems_of(model, values, error, locate)


def check_path(path: object) -> None:
    """Refuse a value that is not a path, and an empty one."""
    if not isinstance(path, str | os.PathLike) or path == "":
        remedy = "pass the path of a file, or call from_overrides(...), which needs none"
        raise refused("path", repr(path), "it must be the path of a YAML file", remedy)


def yaml_of(config: AttentionConfig) -> str:
    """Write the changed keys as YAML from which `from_yaml` reads an equal config."""
    values = {key: value for key, value in config.resolved().items() if key in config.changed}
    if sizes := values.get("flash_block_sizes"):
        values["flash_block_sizes"] = {key: size for key, size in sizes.items() if size is not None}
    values = values or {"attention": config.attention}
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def _of_another_program(
    model: type[Section], data: Mapping[str, Any], source: str, problems: list[ConfigError]
) -> list[ConfigError]:
    """If another program wrote the file, replace the errors of the file by one that names it."""
    from maxattn.config.foreign import recognised_rollout
    from maxattn.config.maxdiffusion import BLOCK_SIZES, recognised

    unknown = {k: v for k, v in data.items() if k not in model.model_fields or k == BLOCK_SIZES}
    theirs = recognised_rollout(data, source) or recognised(unknown, source)
    overrides = (p for p in problems if p.where.startswith("override"))
    return problems if theirs is None else [theirs, *overrides]


def _without_program_sections(
    model: type[Section], data: Mapping[str, Any], locate: Locations
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Drop each section such as `training` that is empty or that the model does not declare."""
    values, problems = dict(data), []
    for name in PROGRAM_SECTIONS:
        if name not in data or (name in model.model_fields and data[name] is not None):
            continue
        value = values.pop(name)
        if value is not None and not isinstance(value, dict):
            rule = f"'{name}' is a section for a program's own settings and must be a mapping"
            remedy = "write its keys indented below it, or remove the line"
            problems.append(ConfigError(name, show(value), rule, remedy, locate((name,))))
    return values, problems


class Locations:
    """Finds where a key was set: the number of the override, or the file and line."""

    def __init__(self, document: Document, source: str, origins: Mapping[Path, str]) -> None:
        self.document, self.source, self.origins = document, source, origins

    def __call__(self, path: Path) -> str:
        within = [p for p in self.origins if path[: len(p)] == p]
        if within:
            return self.origins[max(within, key=len)]
        line, found = self.document.line_of(path)
        below = [where for p, where in self.origins.items() if p[: len(path)] == path]
        if below and found < len(path):
            return below[-1]
        return self.document.where(line) if line else self.source


def in_file_order(problem: ConfigError) -> tuple[bool, int]:
    """Return a sort key: lines of the file first, then overrides by their numbers."""
    number = problem.where.replace("override ", "override:").rpartition(":")[2]
    return problem.where.startswith("override"), int(number) if number.isdigit() else 0


# ---- overrides -----------------------------------------------------------------------------------


def apply_overrides(
    model: type[BaseModel], data: dict[str, Any], overrides: Overrides
) -> tuple[dict[Path, str], list[ConfigError]]:
    """Apply overrides to `data` in place; return which override set each path, and the problems.

    If a name is no key of the model and only one section has a key of that name, the override sets
    that key: `steps=20` sets `training.steps`.
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
    if isinstance(overrides, Mapping):
        return [f"{key}={_as_yaml(str(key), value)}" for key, value in overrides.items()]
    is_text = isinstance(overrides, str)
    if (
        is_text
        or not isinstance(overrides, Sequence)
        or not all(isinstance(text, str) for text in overrides)
    ):
        rule = "it must be a list of key=value texts, or a dict of values by key"
        remedy = f'write ["{overrides if is_text else "attention=ring"}"]'
        raise refused("overrides", plain(overrides), rule, remedy)
    return list(overrides)


def _as_yaml(key: str, value: Any) -> str:
    try:
        return json.dumps(value)  # JSON is valid YAML
    except (TypeError, ValueError, RecursionError):  # no plain value, too many digits, or too deep
        rule = "it must be text, a number, true, false, null, or a list or dict of these"
        raise refused(key, plain(value), rule, "pass one of these") from None


def _read(
    model: type[BaseModel], data: Mapping[str, Any], text: str, where: str
) -> tuple[Path, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    path: Path = tuple(key.split("."))
    if not equals:
        rule, remedy = "an override must be key=value", f"write {key or 'key'}=value"
        raise refused(key or "(nothing)", "(no value)", rule, remedy, where)
    if not all(path) or len(path) > DEEPEST:
        rule = f"a key must be one to {DEEPEST} names joined by dots"
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
    """Return the keys of each section: those that the model declares, else those in the file."""
    found = {}
    for name in dict.fromkeys((*PROGRAM_SECTIONS, *model.model_fields)):
        if name in model.model_fields:
            found[name] = keys_of(model, name)
        elif isinstance(given := data.get(name), Mapping):
            found[name] = tuple(map(str, given))
    return {name: keys for name, keys in found.items() if name != "flash_block_sizes"}


def _check_in_file(
    model: type[BaseModel], data: Mapping[str, Any], path: Path, value: str, where: str
) -> None:
    here: Any = data
    for depth, part in enumerate(path):
        if not isinstance(here, Mapping) or part not in here:
            key = dotted(path)
            unread = f"{model.__name__} does not read the section '{path[0]}'"
            known = here if isinstance(here, Mapping) else ()
            guess = did_you_mean(
                dotted(path[: depth + 1]), [dotted((*path[:depth], str(k))) for k in known]
            )
            remedy = guess or f"remove the override, or write {key} in the file"
            raise refused(key, value, f"{unread}, and the file has no key {key}", remedy, where)
        here = here[part]


def _put(data: dict[str, Any], path: Path, value: Any, where: str) -> None:
    here = data
    for depth, part in enumerate(path[:-1], start=1):
        below = here.get(str(part))
        if below is not None and not isinstance(below, dict):
            above = dotted(path[:depth])
            rule = f"{above} is {plain(below)}, which has no keys"
            raise refused(dotted(path), plain(value), rule, f"write {above}=value", where)
        # YAML aliases may share a mapping, so each mapping on the path is copied.
        here[str(part)] = here = dict(below or {})
    here[str(path[-1])] = value
