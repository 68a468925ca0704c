"""A pipeline's folder in diffusers' format: its parts, its JSON files, and which are supported."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.weights.replacing import replacing

Family = Literal["wan", "sdxl", "flux"]
PIPELINES: Mapping[Family, tuple[str, ...]] = {
    "wan": ("WanPipeline", "WanImageToVideoPipeline"),
    "sdxl": ("StableDiffusionXLPipeline",),
    "flux": ("FluxPipeline",),
}  # fmt: skip
REPOSITORIES: Mapping[Family, str] = {
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "flux": "black-forest-labs/FLUX.1-schnell",
}
NAMES: Mapping[str, str] = {"wan": "Wan", "sdxl": "SDXL", "flux": "Flux.1"}
# The parts of Wan 2.2's A14B: the second computes the steps with less noise.
FIRST, SECOND = "transformer", "transformer_2"
EXPANDS = "expand_timesteps"


def absent(
    folder: str | Path, setting: str = "model.folder", repository: str = "REPOSITORY"
) -> Iterator[ConfigError]:
    """Yield an error if a folder does not exist.

    Args:
        folder: a pipeline's, or a model's.
        repository: the Hugging Face repository to name in the message.
    """
    if Path(folder).is_dir():
        return
    made = f"`hf download {repository} --local-dir FOLDER` makes one"
    rule = "the folder does not exist, and nothing is downloaded"
    remedy = f"give a local copy of a Hugging Face repository in diffusers' format; {made}"
    yield ConfigError(setting, folder, rule, remedy)


def part_of(folder: str | Path, part: str) -> Path:
    """Return the folder of a part: a subfolder, or `folder` itself if there is none."""
    inside = Path(folder) / part
    return inside if inside.is_dir() else Path(folder)


def part_error(folder: str | Path, part: str) -> ConfigError | None:
    """Return an error if a pipeline's folder lacks a part that its `model_index.json` lists."""
    folder = Path(folder)
    if part not in index_of(folder) or (folder / part).is_dir():
        return None
    rule = "model_index.json lists this part, which has the model's weights"
    remedy = "fetch the whole folder"
    return ConfigError("model.folder", f"{folder}: without {part}", rule, remedy)


def config_of(folder: Path, part: str) -> dict[str, Any]:
    """Read the `config.json` of a part; empty if it does not exist."""
    return _json(folder / part / "config.json")


def index_of(folder: Path) -> dict[str, Any]:
    """Read `model_index.json`; empty if it does not exist."""
    return _json(folder / "model_index.json")


def continues_images(index: Mapping[str, Any]) -> bool:
    """Check in `model_index.json` whether the first frame of a video can be an image."""
    return bool(index.get(EXPANDS))


def boundary_of(folder: Path) -> float | None:
    """Return the share of the times above which the first of two transformers computes.

    None if the pipeline has one transformer, or if there is no `model_index.json`.
    """
    return index_of(folder).get("boundary_ratio")


def _json(path: Path) -> dict[str, Any]:
    return read_mapping(path) if path.is_file() else {}


def lacking(folder: Path, parts: tuple[str, ...]) -> list[str]:
    """List the parts whose folders are missing."""
    return [part for part in parts if not (folder / part).is_dir()]


def pipeline_errors(folder: Path, family: Family) -> Iterator[ConfigError]:
    """Yield an error for each reason why the examples cannot sample a pipeline."""
    if (problem := class_error(folder, family)) is not None:
        yield problem
        return
    index = index_of(folder)
    has_two, boundary = index.get(SECOND) not in (None, [None, None]), boundary_of(folder)
    if has_two != (boundary is not None):
        value = f"{SECOND} {index.get(SECOND)}, boundary_ratio {boundary}"
        rule = "boundary_ratio is the time at which the second transformer takes over"
        yield _error(folder, value, rule)
    elif has_two and not _is_share(boundary):
        rule = "it is a number between 0 and 1, a share of the times"
        yield _error(folder, f"boundary_ratio {boundary!r}", rule)
    if has_two and not (folder / SECOND).is_dir():
        yield _error(folder, f"without {SECOND}", "the pipeline has two transformers")
    if type(index.get(EXPANDS)) not in (bool, type(None)):
        rule = "it is true where the first frame has a time of its own, else false"
        yield _error(folder, f"{EXPANDS} {index[EXPANDS]!r}", rule)


def check_pipeline(folder: str | None, family: Family) -> None:
    """Refuse an unsupported pipeline, before the sizes of its model are read.

    Args:
        folder: a pipeline's, or a model's; None for random weights.

    Raises:
        ConfigErrors: all errors of `pipeline_errors`.
    """
    if folder is not None and (problems := list(pipeline_errors(Path(folder), family))):
        raise ConfigErrors(problems)


def boundary_error(folder: Path) -> ConfigError | None:
    """Return an error if a folder has two transformers, but no boundary between them.

    None for one transformer, and if `model_index.json` lists the second.
    """
    if not (folder / SECOND).is_dir() or SECOND in index_of(folder):
        return None
    value = f"{folder}: {SECOND}, which no model_index.json lists"
    rule = f"its boundary_ratio is the time at which {SECOND} takes over from {FIRST}"
    remedy = "fetch model_index.json too, or give the folder of one transformer"
    return ConfigError("model.folder", value, rule, remedy)


def class_error(folder: Path, family: Family) -> ConfigError | None:
    """Return an error if `model_index.json` names the class of another family; else None."""
    kind, known = index_of(folder).get("_class_name"), PIPELINES[family]
    if kind is None or kind in known:
        return None
    own = f"give a folder of {NAMES[family]} in diffusers' format"
    others = [name for name, kinds in PIPELINES.items() if kind in kinds]
    other = [f"; {NAMES[name]} has {commands(name)}" for name in others]
    rule = f"{NAMES[family]} is in the folder of a {' or '.join(known)}"
    return ConfigError("model.folder", f"{folder}: _class_name {kind}", rule, own + "".join(other))


def commands(family: str) -> str:
    """Name the commands that sample and train the models of a family."""
    return f"commands of its own, examples/generate.py {family} and train.py {family}"


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _error(folder: Path, value: str, rule: str) -> ConfigError:
    remedy = "fetch the folder again: the pipeline of a repository in diffusers' format"
    return ConfigError("model.folder", f"{folder}: {value}", rule, remedy)


MOST_BYTES = 2**24  # settings have some thousand


def read_mapping(path: Path, setting: str = "model.folder") -> dict[str, Any]:
    """Read a JSON file whose content is a mapping.

    Raises:
        ConfigError: it cannot be read, is not JSON, or is not a mapping.
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
    """Write a JSON file; make its folder if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(values, indent=2) + "\n")
