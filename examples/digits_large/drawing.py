"""Draws many clips in batches, from the same noise whatever the way of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from sample.loop import Walk
from sample.paths import Paths
from sample.planned import predicts_both
from sample.rows import Rows, batch_ways, place, told_in_rows
from sample.run import load, steps_of
from samplers.noise import keys_of

from maxattn import sharding

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
    """

    clips: Float[np.ndarray, "n F H W 3"]
    seconds: float


@sharding.inside_auto_axes()
def draw(task: ClipSamplingTask, told: Conditions, mesh: jax.sharding.Mesh | None = None) -> Drawn:
    """Draw clips.

    Args:
        task: of a way of sampling.
        told: prompts and noise.
        mesh: devices to draw on; default the one there is.
    """
    mesh, paths = sharding.program_mesh(mesh), Paths(task.folder)
    model, sampling = load(task, paths, mesh), task.settings.sampling
    rows = _rows(task, told.batch, mesh)
    steps = steps_of(task, paths, rows)
    schedule = steps.sampler.schedule(sampling.num_inference_steps)
    keys = keys_of(sampling.seed, len(told.prompts)) if steps.sampler.renoises else None
    seconds, clips = 0.0, []
    walk: Walk | None = None
    for first in range(0, len(told.prompts), told.batch):
        some = slice(first, first + told.batch)
        arrays = _told(task, told.prompts[some], rows, mesh)
        noise, fresh = place(told.noise[some], mesh), None if keys is None else keys[some]
        given = arrays, noise, None if fresh is None else place(fresh, mesh)
        if walk is None:
            walk = Walk(task, *given[:2], schedule, steps.planned, keys=given[2], mesh=mesh)
        else:
            walk.begin(*given)
        with walk:
            for expert in steps.experts:
                walk.take(model, expert)
        seconds += walk.bar.seconds
        clips.append(np.asarray(walk.state.x, np.float32))
    return Drawn(np.concatenate(clips), seconds)


def _rows(task: ClipSamplingTask, batch: int, mesh: jax.sharding.Mesh | None) -> Rows:
    both = task.settings.sampling.guided and predicts_both(task)
    return Rows(batch, 1, 2 if both else 1, batch_ways(mesh))


def _told(
    task: ClipSamplingTask, prompts: Sequence[str], rows: Rows, mesh: jax.sharding.Mesh | None
) -> tuple[dict[str, jax.Array], ...]:
    """Return what the model is told of prompts, for each call of a step."""
    guided, arrays = task.settings.sampling.guided, {"text": words.encode(prompts)}
    if guided:
        arrays["negative_text"] = words.encode([""])
    parts = told_in_rows(task.completed(arrays), rows, guided)
    return tuple({name: place(x, mesh) for name, x in part.items()} for part in parts)
