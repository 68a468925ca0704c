"""Draws many clips in batches, from the same noise whatever the way of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from maxattn import sharding
from maxattn_examples.compare.runner import Runner
from maxattn_examples.sample.files import Paths
from maxattn_examples.sample.resolve import predicts_both
from maxattn_examples.sample.rows import Rows, batch_ways, told_in_rows
from maxattn_examples.sample.run import Start
from maxattn_examples.sample.task import Arrays
from maxattn_examples.samplers.schedule import keys_of

from . import words
from .sampling_task import ClipSamplingTask


@dataclass(frozen=True)
class Conditions:
    """What every way of sampling is given.

    Args:
        prompts: one a clip.
        noise: one a clip, channels last.
        batch: clips that are drawn at once, which divide the others.
    """

    prompts: Sequence[str]
    noise: Float[np.ndarray, "n F H W 3"]
    batch: int


class Drawn(NamedTuple):
    """The clips of a way of sampling.

    Args:
        clips: as the model drew them, channels last.
        seconds: of all steps, without compiling.
        forwards: that were computed, in the mean of the batches.
    """

    clips: Float[np.ndarray, "n F H W 3"]
    seconds: float
    forwards: float


def draw(task: ClipSamplingTask, told: Conditions, mesh: jax.sharding.Mesh | None = None) -> Drawn:
    """Draw clips.

    Args:
        task: of a way of sampling.
        told: prompts and noise.
        mesh: devices to draw on; default the one there is.
    """
    mesh, count = sharding.program_mesh(mesh), len(told.prompts)
    rows, keys = rows_of(task, told.batch, mesh), keys_of(task.settings.sampling.seed, count)
    start = Start(_told(task, told.prompts[: told.batch], rows), rows)
    runner = Runner(task, Paths(task.folder), start, mesh)
    runs = []
    for first in range(0, count, told.batch):
        some = slice(first, first + told.batch)
        prompts = _told(task, told.prompts[some], rows)
        runner.give(prompts, told.noise[some], keys[some])
        runs.append(runner.run())
    clips = np.concatenate([run.latents for run in runs]).astype(np.float32)
    forwards = sum(run.forwards for run in runs) / len(runs)
    return Drawn(clips, sum(run.seconds for run in runs), forwards)


def rows_of(task: ClipSamplingTask, batch: int, mesh: jax.sharding.Mesh | None) -> Rows:
    """Count the rows of a batch of clips."""
    both = task.settings.sampling.guided and predicts_both(task)
    return Rows(batch, 1, 2 if both else 1, batch_ways(mesh))


def _told(task: ClipSamplingTask, prompts: Sequence[str], rows: Rows) -> tuple[Arrays, ...]:
    """Return what the model is told of prompts, for each call of a step."""
    guided, arrays = task.settings.sampling.guided, {"text": words.encode(prompts)}
    if guided:
        arrays["negative_text"] = words.encode([""])
    return told_in_rows(task.completed(arrays), rows, guided)
