"""Reads the `config.json` beside a model's weights, and refuses a model of another kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from maxattn.errors import WeightsError, did_you_mean

from .json_file import read_mapping
from .pipeline_folder import NAMES, REPOSITORIES, Family, absent, class_error


def read_config(
    folder: str | Path,
    family: Family,
    only: Mapping[str, Any],
    known: Collection[str],
    needs: Collection[str] = (),
) -> dict[str, Any]:
    """Read the settings of a model.

    Args:
        folder: of the model.
        family: that it should belong to.
        only: settings that all models of the family share; a file may leave out those that are
            diffusers' defaults.
        known: what else a file may set.
        needs: which of `only` are no defaults.

    Raises:
        ConfigError: there is no such folder.
        WeightsError: there is no such file, or it describes another kind of model.
    """
    for problem in absent(folder, repository=REPOSITORIES[family]):
        raise problem
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise _no_file(path, family)
    config, name = read_mapping(path), NAMES[family]
    remedy = "give the folder of one"
    for key, value in only.items():
        held = config.get(key, None if key in needs else value)
        if held != value and not (_is_off(held) and _is_off(value)):
            wanted = "none" if value is None else value
            rule = f"the {name} models that can be run here have {wanted}"
            raise WeightsError(key, "not set" if held is None else held, rule, remedy)
    for key in config:
        if not key.startswith("_") and key not in {*only, *known}:
            rule = f"no {name} model here knows this setting, and it may change the numbers"
            close = did_you_mean(key, sorted(set(known) - config.keys()))
            raise WeightsError(key, config[key], rule, close or remedy)
    return config


def _is_off(value: Any) -> bool:
    """Check whether a value is null or false, which diffusers treats alike."""
    return value is None or value is False


def _no_file(path: Path, family: Family) -> WeightsError:
    """Return the error of a folder without sizes; it names the pipeline if there is another."""
    problem = class_error(path.parent, family)
    if problem is not None:
        return WeightsError(problem.setting, problem.value, problem.rule, problem.remedy)
    rule, remedy = "the file gives the model's sizes, and is missing", "give the model's own folder"
    return WeightsError("config.json", path, rule, remedy)
