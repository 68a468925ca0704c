"""A pipeline's folder in diffusers' format: which parts are there, and whether it is one that can
be sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxattn.errors import ConfigError

PIPELINES = {
    "transformer": ("WanPipeline", "WanImageToVideoPipeline"),
    "unet": ("StableDiffusionXLPipeline",),
}  # fmt: skip


REPOSITORIES = {
    "transformer": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "unet": "stabilityai/stable-diffusion-xl-base-1.0",
}


def absent(
    folder: str | Path, setting: str = "model.folder", part: str = "transformer"
) -> Iterator[ConfigError]:
    """Yield that there is no such folder.

    Args:
        folder: of a pipeline, or of a model.
        setting: that named it.
        part: transformer or unet: whose repository is named.
    """
    if not Path(folder).is_dir():
        made = f"`hf download {REPOSITORIES[part]} --local-dir FOLDER` makes one"
        remedy = f"give a local copy of a Hugging Face repository in diffusers' format; {made}"
        yield ConfigError(
            setting, folder, "it names a folder, and there is none; nothing is downloaded", remedy
        )


def part_of(folder: str | Path, part: str) -> Path:
    """Return a part's folder in a pipeline's, or the folder itself where it is the part's own."""
    inside = Path(folder) / part
    return inside if inside.is_dir() else Path(folder)


def config_of(folder: Path, part: str) -> dict[str, Any]:
    """Read the `config.json` of a part; empty where there is none."""
    path = folder / part / "config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def index_of(folder: Path) -> dict[str, Any]:
    """Read `model_index.json`; empty where there is none."""
    path = folder / "model_index.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def lacking(folder: Path, parts: tuple[str, ...]) -> list[str]:
    """List the parts that are not there."""
    return [part for part in parts if not (folder / part).is_dir()]


def wrong(folder: Path, part: str) -> Iterator[ConfigError]:
    """Yield what makes a pipeline one that the models here are not: Wan 2.2's two transformers,
    say.

    Args:
        folder: a pipeline's, or a model's alone.
        part: transformer or unet.
    """
    index = index_of(folder)
    ours = PIPELINES[part]
    if index and (kind := index.get("_class_name")) not in ours:
        yield _of(folder, f"_class_name {kind}", f"it is the folder of a {' or '.join(ours)}")
    two = [
        key
        for key in ("transformer_2", "boundary_ratio", "expand_timesteps")
        if index.get(key) not in (None, False, [None, None])
    ]
    for key in two:
        yield _of(
            folder, f"{key} {index[key]}", "a Wan 2.1 pipeline has one transformer for all times"
        )


def _of(folder: Path, value: str, rule: str) -> ConfigError:
    return ConfigError(
        "model.folder",
        f"{folder}: {value}",
        rule,
        "give the folder of Wan 2.1 or SDXL in diffusers' format",
    )
