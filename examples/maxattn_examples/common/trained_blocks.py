"""How many frames a model makes together, as its folder says: it is a part of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from maxattn.errors import ConfigError

from .json_file import read_mapping
from .size_types import size_of

KEY = "frames_per_block"


def frames_per_block(folder: Path) -> int | None:
    """Read how many frames a model was trained to make together; None where nothing says it.

    Args:
        folder: of the model, with its `config.json`.

    Raises:
        WeightsError: what the file says is no number of frames.
    """
    path = folder / "config.json"
    config = read_mapping(path) if path.is_file() else {}
    return size_of(config, KEY, int | None, None)


def saying(config: Mapping[str, Any], frames: int | None) -> dict[str, Any]:
    """Return a model's `config.json` that says how many frames it makes together.

    Args:
        config: what else it says.
        frames: of a block; None for a model whose frames all see each other.
    """
    rest = {key: value for key, value in config.items() if key != KEY}
    return rest if frames is None else rest | {KEY: frames}


def block_errors(setting: str, folder: Path, wanted: int) -> Iterator[ConfigError]:
    """Yield that a model was trained with blocks of another length, or without any.

    Args:
        setting: that names the folder.
        folder: of the model.
        wanted: frames of a block.
    """
    found = frames_per_block(folder)
    if found is not None and found != wanted:
        rule = f"the model in {folder} was trained with blocks of {found} frames"
        yield ConfigError("rollout.frames_per_block", wanted, rule, f"write {found}")
    if found is None and (folder / "config.json").is_file():
        rule = (
            "a model that was trained on whole videos, each frame seeing all others, draws nothing"
            f" that makes sense block by block, and its config.json has no {KEY}"
        )
        remedy = f'give one that was trained so; if this is one, add "{KEY}": {wanted} to the file'
        yield ConfigError(setting, folder, rule, remedy)


def whole_errors(setting: str, folder: Path) -> Iterator[ConfigError]:
    """Yield that a model was trained block by block, where all frames are to be made at once.

    Args:
        setting: that names the folder.
        folder: of the model.
    """
    if (found := frames_per_block(folder)) is not None:
        rule = (
            f"all frames are made at once, each seeing all others, and this model was trained with"
            f" blocks of {found} frames"
        )
        yield ConfigError(setting, folder, rule, "use examples/stream.py, or another model")


def block_note(path: Path) -> str | None:
    """Warn that weights may be of a model that was not trained block by block."""
    if (path / "config.json").is_file():
        return None
    return (
        f"no config.json beside {path} says {KEY}: a model that was trained on whole videos, each"
        " frame seeing all others, draws nothing that makes sense block by block"
    )
