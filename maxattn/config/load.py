"""Loads a config: a YAML file, then overrides, then validation.

Every problem is reported at once, with its file and line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from maxattn.config.document import Document, read
from maxattn.config.errors import ConfigErrors, Path, refused, show
from maxattn.config.overrides import Overrides, apply_overrides
from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.config.section import Section, problems_of
from maxattn.errors import ConfigError

Config = TypeVar("Config", bound=Section)


def load(model: type[Config], path: str | os.PathLike[str] | None, overrides: Overrides) -> Config:
    """Read, override and validate.

    Args:
        model: the config class.
        path: the YAML file, or None for overrides alone.
        overrides: `key=value` texts, or values by key.

    Raises:
        ConfigErrors: with every problem of file and overrides, in the order of the file.
    """
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
    """Return a config, or None and what is wrong with its values."""
    try:
        return model.model_validate(values), []
    except ValidationError as error:
        return None, problems_of(model, values, error, locate)


def check_path(path: object) -> None:
    """Refuse what names no file.

    Raises:
        ConfigErrors: saying what builds a config without a file.
    """
    if not isinstance(path, str | os.PathLike):
        remedy = "give its path, or call from_overrides(...) without a file"
        raise refused("path", repr(path), "a config is read from a YAML file", remedy)


def _of_another_program(
    model: type[Section], data: Mapping[str, Any], source: str, problems: list[ConfigError]
) -> list[ConfigError]:
    """Report a foreign file once, in place of one problem for each of its keys."""
    from maxattn.config.maxdiffusion import BLOCK_SIZES, CUSTOM_SIZES, recognised
    from maxattn.config.self_forcing import recognised_rollout

    if (theirs := recognised_rollout(data, source)) is not None:
        return [theirs, *(p for p in problems if p.where.startswith("override"))]
    unknown = {key for key in data if key not in model.model_fields}
    foreign = recognised({k: v for k, v in data.items() if k in {*unknown, BLOCK_SIZES}}, source)
    if foreign is None:
        return problems
    names = unknown | {f"{BLOCK_SIZES}.{key}" for key in CUSTOM_SIZES}
    ours = (p for p in problems if p.setting not in names or p.where.startswith("override"))
    return [foreign, *ours]


def _without_program_sections(
    model: type[Section], data: Mapping[str, Any], locate: Locations
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Leave out the sections that belong to a program, and empty ones."""
    values, problems = dict(data), []
    for name in PROGRAM_SECTIONS:
        if name not in data or (name in model.model_fields and data[name] is not None):
            continue
        value = values.pop(name)
        if value is not None and not isinstance(value, dict):
            rule = f"'{name}' is the section of a program's own settings: a mapping"
            remedy = "write its keys indented below it, or remove the line"
            problems.append(ConfigError(name, show(value), rule, remedy, locate((name,))))
    return values, problems


class Locations:
    """Returns where a path was written: the override that set it, or the line of the file."""

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
    """Sort by line, overrides last."""
    number = problem.where.replace("override ", "override:").rpartition(":")[2]
    return problem.where.startswith("override"), int(number) if number.isdigit() else 0
