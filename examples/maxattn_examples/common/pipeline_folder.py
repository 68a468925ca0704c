"""A pipeline's folder in diffusers' format: its parts, its JSON files, and what can be sampled."""

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
# The parts of Wan 2.2's A14B: the second takes the steps with less noise.
FIRST, SECOND = "transformer", "transformer_2"
EXPANDS = "expand_timesteps"


def absent(
    folder: str | Path, setting: str = "model.folder", repository: str = "REPOSITORY"
) -> Iterator[ConfigError]:
    """Yield an error where there is no such folder.

    Args:
        folder: of a pipeline, or of a model.
        repository: where the model can be had; default anyone's.
    """
    if Path(folder).is_dir():
        return
    made = f"`hf download {repository} --local-dir FOLDER` makes one"
    rule = "it names a folder, and there is none; nothing is downloaded"
    remedy = f"give a local copy of a Hugging Face repository in diffusers' format; {made}"
    yield ConfigError(setting, folder, rule, remedy)


def part_of(folder: str | Path, part: str) -> Path:
    """Return a part's folder in a pipeline's, or the folder itself where it is the part's own."""
    inside = Path(folder) / part
    return inside if inside.is_dir() else Path(folder)


def part_error(folder: str | Path, part: str) -> ConfigError | None:
    """Return that a pipeline's folder lacks a part that its `model_index.json` speaks of."""
    folder = Path(folder)
    if part not in index_of(folder) or (folder / part).is_dir():
        return None
    rule = "model_index.json lists this part, which has the model's weights"
    remedy = "fetch the whole folder"
    return ConfigError("model.folder", f"{folder}: without {part}", rule, remedy)


def config_of(folder: Path, part: str) -> dict[str, Any]:
    """Read the `config.json` of a part; empty where there is none."""
    return _json(folder / part / "config.json")


def index_of(folder: Path) -> dict[str, Any]:
    """Read `model_index.json`; empty where there is none."""
    return _json(folder / "model_index.json")


def continues_images(index: Mapping[str, Any]) -> bool:
    """Check by `model_index.json` whether the first frame of a video can be an image."""
    return bool(index.get(EXPANDS))


def boundary_of(folder: Path) -> float | None:
    """Return above which share of the times the first of two transformers takes the steps.

    None where the pipeline has one transformer, and where no `model_index.json` says anything.
    """
    return index_of(folder).get("boundary_ratio")


def _json(path: Path) -> dict[str, Any]:
    return read_mapping(path) if path.is_file() else {}


def lacking(folder: Path, parts: tuple[str, ...]) -> list[str]:
    """List the parts that are not there."""
    return [part for part in parts if not (folder / part).is_dir()]


def pipeline_errors(folder: Path, family: Family) -> Iterator[ConfigError]:
    """Yield what makes a pipeline one that the examples cannot sample."""
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
    """Refuse a pipeline that the examples cannot run, before the sizes of its model are read.

    Args:
        folder: a pipeline's, or a model's alone; None for random weights.

    Raises:
        ConfigErrors: with all that `pipeline_errors` yields.
    """
    if folder is not None and (problems := list(pipeline_errors(Path(folder), family))):
        raise ConfigErrors(problems)


def boundary_error(folder: Path) -> ConfigError | None:
    """Return that no `model_index.json` says which of two transformers takes which steps.

    None where there is one transformer, and where the file speaks of the second.
    """
    if not (folder / SECOND).is_dir() or SECOND in index_of(folder):
        return None
    value = f"{folder}: {SECOND}, which no model_index.json lists"
    rule = f"its boundary_ratio is the time at which {SECOND} takes over from {FIRST}"
    remedy = "fetch model_index.json too, or give the folder of one transformer"
    return ConfigError("model.folder", value, rule, remedy)


def class_error(folder: Path, family: Family) -> ConfigError | None:
    """Return why a pipeline is no model of a family; None where it is, and where nothing says."""
    kind, known = index_of(folder).get("_class_name"), PIPELINES[family]
    if kind is None or kind in known:
        return None
    own = f"give a folder of {NAMES[family]} in diffusers' format"
    others = [name for name, kinds in PIPELINES.items() if kind in kinds]
    other = [f"; {NAMES[name]} has {commands(name)}" for name in others]
    rule = f"{NAMES[family]} is in the folder of a {' or '.join(known)}"
    return ConfigError("model.folder", f"{folder}: _class_name {kind}", rule, own + "".join(other))


def commands(family: str) -> str:
    """Name the commands that draw and train the models of a family."""
    return f"commands of its own, examples/generate.py {family} and train.py {family}"


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _error(folder: Path, value: str, rule: str) -> ConfigError:
    remedy = "fetch the folder again: the pipeline of a repository in diffusers' format"
    return ConfigError("model.folder", f"{folder}: {value}", rule, remedy)


MOST_BYTES = 2**24  # settings have some thousand


def read_mapping(path: Path, setting: str = "model.folder") -> dict[str, Any]:
    """Read a JSON file that holds settings by name.

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
