"""A pipeline's folder in diffusers' format: its parts, and what their JSON files say.

`model_index.json` has the pipeline's class and parts, a model's `config.json` its class, its sizes
and its blocks of frames.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, WeightsError, did_you_mean
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
    elif has_two and not (isinstance(boundary, float) and 0 < boundary < 1):
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


def read_config(
    folder: str | Path,
    family: Family,
    only: Mapping[str, Any],
    known: Collection[str],
    needs: Collection[str] = (),
) -> dict[str, Any]:
    """Read the settings of a model.

    Args:
        only: values that all supported models of the family have; a file may leave out
            those that are diffusers' defaults.
        needs: the keys of `only` whose values are not diffusers' defaults.

    Raises:
        ConfigError: the folder does not exist.
        WeightsError: the file does not exist, or it describes another kind of model.
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
            rule = f"{name} models do not support this setting here, and it may change the numbers"
            close = did_you_mean(key, sorted(set(known) - config.keys()))
            raise WeightsError(key, config[key], rule, close or remedy)
    return config


def _is_off(value: Any) -> bool:
    """Check whether a value is null or false, which diffusers treats alike."""
    return value is None or value is False


def _no_file(path: Path, family: Family) -> WeightsError:
    problem = class_error(path.parent, family)
    if problem is not None:
        return WeightsError(problem.setting, problem.value, problem.rule, problem.remedy)
    rule, remedy = "the file gives the model's sizes, and is missing", "give the model's own folder"
    return WeightsError("config.json", path, rule, remedy)


# ---- a model's config.json -----------------------------------------------------------------------

Sizes = TypeVar("Sizes")
AGAIN = "fetch the folder again"
MOST = 10**6


def checked(kind: Callable[..., Sizes], config: Mapping[str, Any], usual: Any) -> Sizes:
    """Make sizes from the values of a file.

    Args:
        usual: defaults of the keys that a file may leave out.

    Raises:
        WeightsError: a size is missing or of another type, or sizes do not fit each other.
    """
    types, values = get_type_hints(kind), {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name not in config and field.name not in usual:
            rule = f"{field.name} is required: diffusers' default is another model's"
            raise WeightsError("config.json", f"without {field.name}", rule, AGAIN)
        value = size_of(config, field.name, types[field.name], usual.get(field.name))
        values[field.name] = tuple(value) if isinstance(value, list) else value
    found: Any = kind(**values)
    for misfit in found.misfits():
        raise WeightsError(misfit.setting, misfit.value, misfit.rule, AGAIN)
    return found


def size_of(config: Mapping[str, Any], key: str, wanted: Any, usual: Any) -> Any:
    """Return one size of a file, or its default.

    Raises:
        WeightsError: it is of another type.
    """
    if not _is(value := config.get(key, usual), wanted):
        raise WeightsError(key, repr(value), f"it is {_words(wanted)}", AGAIN)
    return value


def _is(value: Any, wanted: Any) -> bool:
    """Check whether a value of JSON has a type; sizes are positive."""
    if wanted is int:
        return type(value) is int and 0 < value <= MOST
    if wanted is float:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    if get_origin(wanted) is tuple:
        return _is_list(value, get_args(wanted))
    if NoneType in get_args(wanted):
        return value is None or any(_is(value, each) for each in get_args(wanted))
    return type(value) is wanted


def _is_list(value: Any, wanted: tuple[Any, ...]) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    each = wanted[:1] * len(value) if wanted[-1] is ... else wanted
    return len(each) == len(value) and all(map(_is, value, each))


def _words(wanted: Any) -> str:
    said = {
        int: f"a whole number from 1 to {MOST:,}",
        float: "a number above 0",
        bool: "true or false",
    }
    if get_origin(wanted) is tuple:
        each = get_args(wanted)
        many = f"whole numbers from 1 to {MOST:,}" if each[0] is int else "names"
        return f"a list of {many}" if each[-1] is ... else f"a list of {len(each)} {many}"
    if NoneType in get_args(wanted):
        return f"{_words(next(x for x in get_args(wanted) if x is not NoneType))}, or null"
    return said.get(wanted, "a text")


KEY = "frames_per_block"


def frames_per_block(folder: Path) -> int | None:
    """Read how many frames a block of the model has; None if no file gives a number.

    Raises:
        WeightsError: the value is not a number of frames.
    """
    path = folder / "config.json"
    config = read_mapping(path) if path.is_file() else {}
    return size_of(config, KEY, int | None, None)


def saying(config: Mapping[str, Any], frames: int | None) -> dict[str, Any]:
    """Return the values of a model's `config.json` with its number of frames per block.

    Args:
        frames: None for a model in which every frame attends to all others.
    """
    rest = {key: value for key, value in config.items() if key != KEY}
    return rest if frames is None else rest | {KEY: frames}


def block_errors(setting: str, folder: Path, wanted: int) -> Iterator[ConfigError]:
    """Yield an error if a model was trained with blocks of another length, or without blocks."""
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
    """Yield an error if a model was trained block by block, but is to sample all frames at once."""
    if (found := frames_per_block(folder)) is not None:
        rule = (
            f"all frames are made at once, each seeing all others, and this model was trained with"
            f" blocks of {found} frames"
        )
        yield ConfigError(setting, folder, rule, "use examples/stream.py, or another model")


def block_note(path: Path) -> str | None:
    """Return a warning if it is unknown whether weights were trained block by block."""
    if (path / "config.json").is_file():
        return None
    return (
        f"no config.json beside {path} says {KEY}: a model that was trained on whole videos, each"
        " frame seeing all others, draws nothing that makes sense block by block"
    )
