"""Read and check the `config.json` of a model: its class, its sizes, its blocks of frames."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from maxattn.errors import ConfigError, WeightsError, did_you_mean

from .pipeline_folder import NAMES, REPOSITORIES, Family, absent, class_error, read_mapping


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
    """Return the error for a folder without `config.json`, which may be a pipeline's."""
    problem = class_error(path.parent, family)
    if problem is not None:
        return WeightsError(problem.setting, problem.value, problem.rule, problem.remedy)
    rule, remedy = "the file gives the model's sizes, and is missing", "give the model's own folder"
    return WeightsError("config.json", path, rule, remedy)


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
