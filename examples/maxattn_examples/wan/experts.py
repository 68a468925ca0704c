"""Training one of Wan 2.2's two transformers: which one, at which times, and errors.

Wan 2.2 A14B has one transformer for the noisier times and one for the others. The boundary between
them is a share of the times, from the pipeline's `model_index.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import (
    FIRST,
    REPOSITORIES,
    SECOND,
    absent,
    boundary_error,
    boundary_of,
    index_of,
    pipeline_errors,
)

from .settings import BOUNDARIES

if TYPE_CHECKING:
    from .settings import Settings

PARTS = {"high_noise": FIRST, "low_noise": SECOND}


def part(settings: Settings) -> str:
    """Return the trained transformer's folder in a pipeline's."""
    return PARTS.get(settings.training.expert or "", FIRST)


def boundary(settings: Settings) -> float | None:
    """Return the boundary from the settings, the folder or the name of the sizes."""
    model, said = settings.model, settings.training.boundary_ratio
    if said is None and model.folder is not None:
        said = boundary_of(Path(model.folder))
        if said is None and index_of(Path(model.folder)):
            return None  # a whole pipeline, of one transformer
    return BOUNDARIES.get(model.sizes or "") if said is None else said


def times(settings: Settings) -> tuple[float, float]:
    """Return the least time of the trained transformer, and its upper bound."""
    at, expert = boundary(settings), settings.training.expert
    if expert is None or at is None:
        return (0.0, 1.0)
    return (at, 1.0) if expert == "high_noise" else (0.0, at)


def errors(settings: Settings) -> Iterator[ConfigError]:
    """Yield an error for each reason why the named expert, or none, cannot be trained."""
    training, folder = settings.training, settings.model.folder
    if folder is not None:
        repository = settings.model.repository or REPOSITORIES["wan"]
        problems = [*absent(folder, repository=repository)]
        problems += pipeline_errors(Path(folder), "wan")
        yield from problems
        if problems:
            return
        yield from name_errors(settings.model.sizes, Path(folder))
    yield from _boundary_errors(settings)
    if training.expert is None:
        return
    if folder is not None:
        yield from _folder_errors(training.expert, Path(folder))
    if training.picture_every:
        rule = "samples need both transformers, and only one is trained"
        yield ConfigError("training.picture_every", training.picture_every, rule, "set it to 0")


def _boundary_errors(settings: Settings) -> Iterator[ConfigError]:
    training, at, folder = settings.training, boundary(settings), settings.model.folder
    if training.expert is None and at is not None:
        rule = "the model has two transformers, which are trained one at a time"
        remedy = f"use high_noise, for times from {at:g} on, or low_noise, for those below"
        yield ConfigError("training.expert", "null", rule, remedy)
    elif training.expert is None and folder and (problem := boundary_error(Path(folder))):
        yield problem
    if training.expert is not None and (why := _one_transformer(settings)):
        rule, remedy = f"it names one of two transformers, and {why[0]}", why[1]
        yield ConfigError("training.expert", training.expert, rule, remedy)
    said = boundary_of(Path(folder)) if folder is not None else None
    if None not in (said, training.boundary_ratio) and said != training.boundary_ratio:
        remedy = "set it to null to take the folder's"
        rule = f"the pipeline in {folder} has {said}"
        yield ConfigError("training.boundary_ratio", training.boundary_ratio, rule, remedy)


def _one_transformer(settings: Settings) -> tuple[str, str] | None:
    """Return rule and remedy if the model has only one transformer, None if it may have two."""
    name, folder = settings.model.sizes, settings.model.folder
    alone = "set training.expert and training.boundary_ratio to null, or "
    if folder is not None and index_of(Path(folder)):
        if boundary_of(Path(folder)) is not None:
            return None
        return "this pipeline has one", f"{alone}give the folder of Wan 2.2 A14B"
    if name is not None and name not in BOUNDARIES:
        return f"{name} has one", f"{alone}write model.sizes={' or '.join(BOUNDARIES)}"
    if boundary(settings) is None:
        remedy = "set training.boundary_ratio, or give the pipeline's folder, above this one"
        return "their boundary is unknown", remedy
    return None


def _folder_errors(expert: str, folder: Path) -> Iterator[ConfigError]:
    own, (other,) = PARTS[expert], (x for name, x in PARTS.items() if name != expert)
    is_pipeline = (folder / FIRST).is_dir() or (folder / SECOND).is_dir()
    if is_pipeline and not (folder / own).is_dir():
        rule, remedy = f"{expert} learns from the folder {own} in it", "fetch the whole folder"
        yield ConfigError("model.folder", f"{folder}: without {own}", rule, remedy)
    if not is_pipeline and folder.name == other:
        rule, remedy = f"{expert} is trained, which is {own}", f"give the folder above, or {own}"
        yield ConfigError("model.folder", folder, rule, remedy)


def name_errors(name: str | None, folder: Path) -> Iterator[ConfigError]:
    """Yield an error if the name of the sizes is of a model with another count of transformers."""
    at = boundary_of(folder)
    if name and index_of(folder) and (name in BOUNDARIES) != (at is not None):
        has = "one transformer" if at is None else "two, with a boundary_ratio"
        rule = f"{name} is not the model of this pipeline, which has {has}"
        yield ConfigError("model.sizes", name, rule, "set it to null to take the folder's")
