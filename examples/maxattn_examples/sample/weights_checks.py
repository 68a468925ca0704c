"""Refuses weights of another pipeline, or of another model, than the one that is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import (
    FIRST,
    NAMES,
    SECOND,
    boundary_of,
    class_error,
    config_of,
    index_of,
    lacking,
    part_of,
)

from .paths import Paths
from .task import SamplingTask


def parts_of(task: SamplingTask, paths: Paths) -> tuple[str, ...]:
    """Name the parts of the folder whose weights are read, of those that are there."""
    has_two = boundary_of(paths.model) is not None and paths.weights_of(SECOND).name == SECOND
    return (task.part, SECOND) if has_two else (task.part,)


def weights_errors(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    """Yield why `--weights` are not those of the model."""
    given, both = paths.weights, boundary_of(paths.model) is not None
    if given is None:
        return
    if not given.exists():
        rule = "it names a folder of weights, and there is none"
        remedy = "name one, such as training.output_dir of a run"
        yield ConfigError("--weights", given, rule, remedy)
    elif both and len(lacking(given, (FIRST, SECOND))) == 2:
        rule = f"a pipeline of two transformers takes a folder with {FIRST}, {SECOND} or both"
        remedy = "give the folder above, such as training.output_dir of a run"
        yield ConfigError("--weights", given, rule, remedy)
    elif (problem := class_error(given, task.family)) is not None:
        yield ConfigError("--weights", problem.value, problem.rule, problem.remedy)
    elif index_of(given) and (boundary_of(given) is not None) != both:
        ours, theirs = ("two transformers", "one") if both else ("one transformer", "two")
        rule = f"the pipeline in {paths.model} has {ours}, and this one has {theirs}"
        yield ConfigError("--weights", given, rule, "give it as --model, or weights of that model")
    else:
        for part in parts_of(task, paths):
            yield from _class_errors(task, paths, part)


def _class_errors(task: SamplingTask, paths: Paths, part: str) -> Iterator[ConfigError]:
    """Yield that the class of the model is not that of the folder's."""
    path = paths.weights_of(part)
    ours, theirs = (_class_of(x) for x in (part_of(paths.model, part), path))
    if None not in (ours, theirs) and ours != theirs:
        rule = f"the model in {paths.model} is a {ours}"
        remedy = f"give weights of {NAMES[task.family]}"
        yield ConfigError("--weights", f"{path}: _class_name {theirs}", rule, remedy)


def _class_of(folder: Path) -> str | None:
    return config_of(folder.parent, folder.name).get("_class_name")
