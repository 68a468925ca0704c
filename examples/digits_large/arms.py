"""Ways of sampling that are compared: each draws the same clips from the same noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from fast import steps
from jaxtyping import Float
from sample.loop import Walk
from sample.paths import Paths
from sample.planned import experts_of, planned_steps, predicts_both
from sample.rows import Rows, batch_ways, place, told_in_rows
from sample.run import load
from samplers.noise import keys_of

from maxattn import sharding
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from . import words
from .sampling_task import ClipSamplingTask
from .settings import Settings

DENSE, FLOOR, REAL = "dense", "floor", "real"
FORM = "write lines such as `half: {num_inference_steps: 25}`"


class Arm(NamedTuple):
    """One way of sampling.

    Args:
        name: in tables.
        changes: of the keys of `sampling`, or of any other by its dotted name.
        same_cost: the name of plain sampling in fewer steps that computes as many forwards.
    """

    name: str
    changes: Mapping[str, Any]
    same_cost: str | None = None

    def overrides(self) -> list[str]:
        """Return the changes as the command line writes them."""
        known = type(Settings().sampling).model_fields
        named = ((f"sampling.{k}" if k in known else k, v) for k, v in self.changes.items())
        return [f"{key}={json.dumps(value)}" for key, value in named]


class Count(NamedTuple):
    """The forwards of a run.

    Args:
        computed: that are computed, counted in layers where some are not.
        whole: of the same run without shortcuts.
    """

    computed: float
    whole: int


@dataclass(frozen=True)
class Conditions:
    """What every way of sampling is given.

    Args:
        prompts: one a clip.
        noise: one a clip, channels last.
        batch: clips that are drawn at once.
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


def read_arms(path: Path | None, given: Sequence[Sequence[str]]) -> list[Arm]:
    """Read ways of sampling, the dense one first.

    Args:
        path: of a YAML file: a mapping of keys of `sampling` by name.
        given: more, each a name and changes KEY=VALUE.

    Raises:
        ConfigErrors: the file is no such mapping, or a change is not written so.
    """
    said: dict[str, Any] = {DENSE: {}}
    if path is not None:
        said |= _mapping(path)
    for name, *changes in given:
        pairs = [change.partition("=") for change in changes]
        if wrong := [key for key, between, _ in pairs if not between]:
            rule = "a change of a way of sampling is KEY=VALUE"
            raise ConfigErrors([ConfigError("--setting", wrong[0], rule, "write steps as 25")])
        said[name] = {key: yaml.safe_load(value) for key, _, value in pairs}
    if taken := [name for name in (DENSE, FLOOR, REAL) if said.get(name)]:
        rule = f"{DENSE} is the file's own sampling, {FLOOR} another kernel's, {REAL} real clips"
        raise ConfigErrors([ConfigError("--settings", taken[0], rule, "give it another name")])
    return [Arm(name, changes or {}) for name, changes in said.items()]


def _mapping(path: Path) -> dict[str, Any]:
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        rule = "it names a YAML file of ways of sampling"
        raise ConfigErrors([ConfigError("--settings", f"{path}: {error}", rule, FORM)]) from None
    whole = isinstance(said, dict) and all(isinstance(x, dict | None) for x in said.values())
    if not whole:
        rule = "it has a mapping of keys of `sampling` for each name"
        raise ConfigErrors([ConfigError("--settings", path, rule, FORM)])
    return said


def task_of(arm: Arm, config: str, overrides: Sequence[str], folder: Path) -> ClipSamplingTask:
    """Return the task of a way of sampling.

    Raises:
        ConfigErrors: its settings do not fit.
    """
    settings = Settings.from_yaml(config, [*overrides, *arm.overrides()])
    task = ClipSamplingTask.of(settings, folder)
    if problems := list(task.size_errors()):
        raise ConfigErrors(problems)
    return task


def forwards(task: ClipSamplingTask) -> Count:
    """Count the forwards of a run of these settings.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    planned = planned_steps(task, task.sampler(), Paths(task.folder))
    return Count(*steps.forwards(planned, task.layers, task.settings.sampling.guided))


def with_same_cost(arms: Sequence[Arm], tasks: Mapping[str, ClipSamplingTask]) -> list[Arm]:
    """Add to each way of sampling with a section `fast` plain sampling in fewer steps.

    Args:
        arms: ways of sampling.
        tasks: of each, by name.
    """
    found: dict[str, Arm] = {}
    for arm in arms:
        if not arm.changes.get("fast"):
            found[arm.name] = arm
            continue
        count, number = forwards(tasks[arm.name]), tasks[arm.name].settings.sampling
        fewer = max(1, round(count.computed / count.whole * number.num_inference_steps))
        plain = {key: value for key, value in arm.changes.items() if key != "fast"}
        plain |= {"num_inference_steps": fewer}
        others = (f"{k}={v}" for k, v in plain.items() if k != "num_inference_steps")
        name = ", ".join([f"{fewer} plain steps", *others])
        found[arm.name] = arm._replace(same_cost=name)
        found.setdefault(name, Arm(name, plain))
    return list(found.values())


@sharding.inside_auto_axes()
def draw(task: ClipSamplingTask, told: Conditions, mesh: jax.sharding.Mesh | None = None) -> Drawn:
    """Draw clips.

    Args:
        task: of a way of sampling.
        told: prompts and noise.
        mesh: devices to draw on; default the one there is.
    """
    mesh, sampler, paths = sharding.program_mesh(mesh), task.sampler(), Paths(task.folder)
    model = load(task, paths, mesh)
    sampling, count = task.settings.sampling, len(told.prompts)
    schedule = sampler.schedule(sampling.num_inference_steps)
    planned = planned_steps(task, sampler, paths)
    keys = keys_of(sampling.seed, count) if sampler.renoises else None
    seconds, clips = 0.0, []
    walk: Walk | None = None
    for first in range(0, count, told.batch):
        some = slice(first, first + told.batch)
        rows, noise = _told(task, told.prompts[some], mesh), place(told.noise[some], mesh)
        fresh = None if keys is None else place(keys[some], mesh)
        if walk is None:
            walk = Walk(task, rows, noise, schedule, planned, keys=fresh, mesh=mesh)
        else:
            walk.begin(rows, noise, fresh)
        with walk:
            for expert in experts_of(task, sampler, True):
                walk.take(model, expert)
        seconds += walk.bar.seconds
        clips.append(np.asarray(walk.state.x, np.float32))
    return Drawn(np.concatenate(clips), seconds)


def _told(
    task: ClipSamplingTask, prompts: Sequence[str], mesh: jax.sharding.Mesh | None
) -> tuple[dict[str, jax.Array], ...]:
    """Return what the model is told of prompts, for each call of a step."""
    guided = task.settings.sampling.guided
    arrays = {"text": words.encode(prompts)}
    if guided:
        arrays["negative_text"] = words.encode([""])
    calls = 2 if guided and predicts_both(task) else 1
    rows = Rows(len(prompts), 1, calls, batch_ways(mesh))
    parts = told_in_rows(task.completed(arrays), rows, guided)
    return tuple({name: place(x, mesh) for name, x in part.items()} for part in parts)
