"""Reads the `config.json` beside a model's weights, and refuses a model of another kind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from maxattn.errors import WeightsError, did_you_mean

from .json_file import read_mapping
from .pipeline_folder import NAMES, Family, absent


def read_config(
    folder: str | Path,
    family: Family,
    only: Mapping[str, Any],
    known: Collection[str] | None = None,
) -> dict[str, Any]:
    """Read the settings of a model.

    Args:
        folder: of the model.
        family: that it should belong to.
        only: settings that all models of the family share; a file may leave them out.
        known: what else a file may set; None lets everything stand.

    Raises:
        ConfigError: there is no such folder.
        WeightsError: there is no such file, or it describes another kind of model.
    """
    for problem in absent(folder, family=family):
        raise problem
    path = Path(folder) / "config.json"
    if not path.is_file():
        rule, remedy = "it says the sizes, and is not there", "give the model's own folder"
        raise WeightsError("config.json", path, rule, remedy)
    config, name = read_mapping(path), NAMES[family]
    for key, value in only.items():
        if config.get(key, value) != value:
            rule = f"the {name} models that can be run here have {value}"
            raise WeightsError(key, config[key], rule, f"give the folder of a {name} model")
    for key in () if known is None else config:
        if not key.startswith("_") and key not in {*only, *known}:
            rule = f"no {name} model here knows this setting, and it may change the numbers"
            remedy = did_you_mean(key, known) or f"give the folder of a {name} model"
            raise WeightsError(key, config[key], rule, remedy)
    return config
