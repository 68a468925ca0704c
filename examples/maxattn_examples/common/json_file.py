"""JSON files: read whole, or refused by name, and written whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxattn.errors import ConfigError

from .replacing import replacing

MOST_BYTES = 2**24  # settings have some thousand


def read_mapping(path: Path, setting: str = "model.folder") -> dict[str, Any]:
    """Read a JSON file that holds settings by name.

    Args:
        path: of the file.
        setting: that named its folder.

    Raises:
        ConfigError: it cannot be read, or is no JSON, or holds something else.
    """
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        said = str(error)[:200]
        rule = f"the file is complete JSON, and reading it failed: {said}"
        raise ConfigError(setting, path, rule, "fetch the folder again") from None
    if not isinstance(found, dict):
        rule = f"the file is a JSON object of settings, and this is a {type(found).__name__}"
        raise ConfigError(setting, path, rule, "fetch the folder again")
    return found


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file, whose folder is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(values, indent=2) + "\n")
