"""How many frames a model makes together, as its folder says: it is a part of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from maxattn.errors import ConfigError

from .json_file import read_mapping

KEY = "frames_per_block"


def frames_per_block(folder: Path) -> int | None:
    """Read how many frames a model was trained to make together; None where nothing says it.

    Args:
        folder: of the model, with its `config.json`.
    """
    path = folder / "config.json"
    return read_mapping(path).get(KEY) if path.is_file() else None


def block_errors(folder: Path, wanted: int) -> Iterator[ConfigError]:
    """Yield another number of frames than the model was trained with.

    Args:
        folder: of the model.
        wanted: frames of a block.
    """
    found = frames_per_block(folder)
    if found is not None and found != wanted:
        rule = f"the model in {folder} was trained with blocks of {found} frames"
        yield ConfigError("rollout.frames_per_block", wanted, rule, f"write {found}")


def block_note(folder: Path) -> str | None:
    """Say that nothing tells whether a model was trained block by block."""
    if frames_per_block(folder) is not None:
        return None
    return (
        f"{folder}/config.json has no {KEY}: a model that was trained on whole videos, each frame"
        " seeing all others, draws nothing that makes sense block by block"
    )
