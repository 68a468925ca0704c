"""Loads a config: YAML file, then overrides, then validation; every problem is reported at once
with its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from maxattn.config import overrides as config_overrides
from maxattn.config.document import Document, parse
from maxattn.config.errors import ConfigErrors, Path, from_pydantic, show
from maxattn.config.overrides import Overrides
from maxattn.config.rules import PROGRAM_SECTIONS
from maxattn.errors import ConfigError

if TYPE_CHECKING:
    from maxattn.config.settings import AttentionConfig

Config = TypeVar("Config", bound="AttentionConfig")


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
    problems, data = list(document.problems), dict(document.data)
    try:
        origins = config_overrides.apply(model, data, overrides)
    except config_overrides.PartlyApplied as error:
        problems, origins = [*problems, *error.problems], error.origins
    places = Places(document, source, origins)
    values, more = _own_sections(model, data, places)
    problems += more
    try:
        config = model.model_validate(values)
        if not problems:
            return config
    except ValidationError as error:
        problems += from_pydantic(model, values, error, places)
    problems = _of_another_project(
        model, document.data, source, sorted(problems, key=in_file_order)
    )
    raise ConfigErrors(problems, source or "overrides") from None


def _of_another_project(
    model: type[AttentionConfig], data: Mapping[str, Any], source: str, problems: list[ConfigError]
) -> list[ConfigError]:
    """Say of a MaxDiffusion file what it is, once, in place of one problem for each of its keys."""
    from maxattn.config.maxdiffusion import CUSTOM_SIZES, SECTION, recognised

    unknown = {key for key in data if key not in model.model_fields}
    foreign = recognised(
        {key: value for key, value in data.items() if key in {*unknown, SECTION}}, source
    )
    if foreign is None:
        return problems
    theirs = unknown | {f"{SECTION}.{key}" for key in CUSTOM_SIZES}
    return [
        foreign,
        *(p for p in problems if p.setting not in theirs or p.where.startswith("override")),
    ]


def check_path(path: object) -> None:
    """Refuse what names no file.

    Raises:
        ConfigErrors: saying what builds a config without a file.
    """
    if not isinstance(path, str | os.PathLike):
        rule, remedy = (
            "a config is read from a YAML file",
            "give its path, or call from_overrides(...) without a file",
        )
        raise _unusable("path", repr(path), rule, remedy)


def read(source: str) -> Document:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigErrors: when it is missing, empty, no YAML, or holds something else than a mapping.
    """
    document = parse(_text(source), lambda line: f"{source}:{line}")
    if document.data is None:
        raise _unusable(
            source, "(empty)", "it holds at least one `key: value`", "write `attention: auto`"
        )
    if not isinstance(document.data, dict):
        kind, dash = (
            ("a list", ", no dash before them")
            if isinstance(document.data, list)
            else ("a single value", "")
        )
        rule = f"the file is a mapping of keys to values; this is {kind}"
        raise _unusable(source, show(document.data), rule, f"write `key: value` lines{dash}")
    return document


def _text(source: str) -> str:
    try:
        return FilePath(source).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise _unusable(
            source, "not found", "a config is a YAML file that exists", _nearby(source)
        ) from None
    except IsADirectoryError:
        raise _unusable(
            source, "a folder", "a config is a YAML file", _nearby(f"{source}/")
        ) from None
    except UnicodeDecodeError as error:
        rule = f"a config is text in UTF-8; byte {error.start} is not"
        raise _unusable(source, "not text", rule, "save the file as UTF-8") from None
    except OSError as error:
        raise _unusable(
            source, "not readable", str(error.strerror), "mend the file's permissions"
        ) from None


def _nearby(source: str) -> str:
    """Suggest a file of the folder, by likeness, else all of its YAML files."""
    folder, name = (
        FilePath(source).parent if not source.endswith("/") else FilePath(source),
        FilePath(source).name,
    )
    found = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    like = get_close_matches(name, found, n=1)
    if like:
        return f"did you mean '{folder / like[0]}'?"
    return f"name one of {', '.join(found)}" if found else f"there is no YAML file in '{folder}'"


def _unusable(source: str, value: str, rule: str, remedy: str) -> ConfigErrors:
    return ConfigErrors([ConfigError(source, value, rule, remedy)])


def _own_sections(
    model: type[AttentionConfig], data: dict[str, Any], places: Places
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Leave out the sections that belong to a program, and those with all of their lines commented
    out.
    """
    values, problems = dict(data), []
    for name in PROGRAM_SECTIONS:
        if name not in data or (name in model.model_fields and data[name] is not None):
            continue
        value = values.pop(name)
        if value is not None and not isinstance(value, dict):
            remedy = "write its keys indented below it, or remove the line"
            rule = f"'{name}' is the section of a program's own settings: a mapping"
            problems.append(ConfigError(name, show(value), rule, remedy, places((name,))))
    return values, problems


class Places:
    """Say where a path was written: the override that set it, or the line of the file."""

    def __init__(self, document: Document, source: str, origins: dict[Path, str]) -> None:
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
