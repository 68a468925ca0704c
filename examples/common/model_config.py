"""Reads the `config.json` beside a model's weights, and refuses a model of another kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from maxattn.errors import WeightsError, did_you_mean

from .json_file import read_mapping
from .pipeline_folder import NAMES, PIPELINES, Family, absent, index_of


def read_config(
    folder: str | Path,
    family: Family,
    only: Mapping[str, Any],
    known: Collection[str] = (),
) -> dict[str, Any]:
    """Read the settings of a model.

    Args:
        folder: of the model.
        family: that it should belong to.
        only: settings that all models of the family share; a file may leave them out.
        known: what else a file may set; default anything.

    Raises:
        ConfigError: there is no such folder.
        WeightsError: there is no such file, or it describes another kind of model.
    """
    for problem in absent(folder, family=family):
        raise problem
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise _no_file(path, family)
    config, name = read_mapping(path), NAMES[family]
    remedy = f"give the folder of a {name} model"
    for key, value in only.items():
        if config.get(key, value) != value:
            rule = f"the {name} models that can be run here have {value}"
            raise WeightsError(key, config[key], rule, remedy)
    for key in config if known else ():
        if not key.startswith("_") and key not in {*only, *known}:
            rule = f"no {name} model here knows this setting, and it may change the numbers"
            raise WeightsError(key, config[key], rule, did_you_mean(key, known) or remedy)
    return config


def _no_file(path: Path, family: Family) -> WeightsError:
    """Say that there are no sizes, and where the folder is a pipeline of others, whose it is."""
    kind, own = index_of(path.parent).get("_class_name"), PIPELINES[family]
    if kind is not None and kind not in own:
        rule = f"{NAMES[family]} models are in the folder of a {' or '.join(own)}"
        return WeightsError("_class_name", kind, rule, "give one, or take the command of this one")
    rule, remedy = "it says the sizes, and is not there", "give the model's own folder"
    return WeightsError("config.json", path, rule, remedy)
