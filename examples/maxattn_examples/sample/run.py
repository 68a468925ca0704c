"""A run of sampling: check everything, read weights, run the steps, write files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxattn import sharding
from maxattn.errors import ConfigError
from maxattn.steps import Steps
from maxattn_examples.common import hosts
from maxattn_examples.samplers.schedule import keys_of

from . import files
from .check import check, check_plan
from .files import Paths
from .loop import Walk
from .resolve import RunSteps, fast_lines, plans_of, predicts_both, resolved
from .rows import Rows, assumed, assumed_lengths, batch_ways, noise, place, told_in_rows
from .task import Arrays, SamplingTask
from .weights import load

Mesh = jax.sharding.Mesh


class Start(NamedTuple):
    """The inputs of a run.

    Args:
        told: the model's arrays for each call of a step.
        rows: of the batch.
    """

    told: tuple[Arrays, ...]
    rows: Rows

    @property
    def lengths(self) -> dict[str, int]:
        """The tokens of a prompt, and of an image if there is one."""
        told = self.told[0]
        return {name: told[name].shape[1] for name in ("text", "image") if name in told}


@sharding.inside_auto_axes()
def generate(task: SamplingTask, paths: Paths, mesh: Mesh | None = None) -> np.ndarray:
    """Sample; write latents, and the decoded samples; return the latents, channels second.

    Args:
        mesh: default the surrounding one.

    Raises:
        ConfigErrors, ConfigError: as `check`.
    """
    mesh = sharding.program_mesh(mesh)
    check(task, paths)
    steps = resolved(task, paths).steps
    list(plans_of(task, steps, batch_ways(mesh), assumed_lengths(task), mesh))  # or refuse them
    start = start_of(task, paths, mesh)
    run = run_of(task, paths, start.rows)
    for line in _opening(task, paths, start, run, mesh):
        print(line)
    latents = _sampled(task, paths, start, run, mesh)
    if hosts.is_first():
        _write(task, paths, latents)
    return latents


@sharding.inside_auto_axes()
def explain(task: SamplingTask, paths: Paths, mesh: Mesh | None = None) -> list[str]:
    """Return the lines that a run prints first, without reading weights or encoding text.

    Without an embeddings file, the settings give a prompt's length.

    Args:
        mesh: default the surrounding one.

    Raises:
        ConfigErrors: settings or sizes are wrong.
    """
    mesh = sharding.program_mesh(mesh)
    check_plan(task, paths)
    start = start_of_plan(task, paths, mesh)
    return [*_opening(task, paths, start, run_of(task, paths, start.rows), mesh)]


# ---- the parts of a run --------------------------------------------------------------------------


def run_of(task: SamplingTask, paths: Paths, rows: Rows) -> RunSteps:
    """Resolve the steps of a batch."""
    return resolved(task, paths, divides=rows.samples % rows.ways == 0)


def start_of_plan(task: SamplingTask, paths: Paths, mesh: Mesh | None) -> Start:
    """Return a run's inputs; without an embeddings file, zeros in the shapes of a prompt."""
    given = paths.embeddings
    arrays = assumed(task) if given is None else files.read(given, "--embeddings")
    return _told(task, arrays, mesh)


def start_of(task: SamplingTask, paths: Paths, mesh: Mesh | None) -> Start:
    """Read or encode the model's conditions."""
    return _told(task, arrays_of(task, paths), mesh)


def _told(task: SamplingTask, arrays: Arrays, mesh: Mesh | None) -> Start:
    """Arrange the model's conditions in batch rows."""
    sampling = task.settings.sampling
    guided = sampling.guided
    if not guided:
        arrays = {name: x for name, x in arrays.items() if not name.startswith("negative_")}
    texts = max(len(x) for x in arrays.values())
    calls = 2 if guided and predicts_both(task) else 1
    rows = Rows(texts, sampling.per_prompt, calls, batch_ways(mesh))
    told = told_in_rows(task.completed(arrays), rows, guided)
    return Start(told, rows)


def arrays_of(task: SamplingTask, paths: Paths) -> Arrays:
    """Read or encode the model's conditions."""
    if paths.embeddings is not None:
        return files.read(paths.embeddings, "--embeddings")
    began = time.perf_counter()
    arrays = task.encode(paths.model, paths.image)
    device = task.settings.sampling.torch_device
    print(f"encoded on {device} in {time.perf_counter() - began:.1f} s")
    return arrays


def noise_of(paths: Paths, rows: Rows, task: SamplingTask) -> np.ndarray:
    """Read or draw the noise, channels second.

    Raises:
        ConfigError: the file has another number of batch rows.
    """
    if paths.noise is None:
        return noise(task.settings.sampling.seed, rows, task.latents)
    given = files.read(paths.noise, "--noise")["noise"].astype(np.float32)
    if len(given) != rows.wanted:
        value = f"{paths.noise}: {len(given)} rows"
        rule = f"one for each of the {rows.wanted} samples"
        raise ConfigError("--noise", value, rule, "set sampling.per_prompt, or make it anew")
    return given[np.resize(np.arange(rows.wanted), rows.samples)]


def _opening(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> Iterator[str]:
    """Yield the lines that a run prints first."""
    sampling, rows, lengths = task.settings.sampling, start.rows, start.lengths
    for plan in plans_of(task, run.steps, rows.samples * rows.calls, lengths, mesh):
        yield plan.explain()
    if (row := sampling.distilled_as) is not None:
        yield f"distilled {row.name}: {row.of}"
    yield f"sampler   {run.sampler}, {sampling.num_inference_steps} steps"
    yield from _guidance_lines(task, rows, run)
    yield from _experts_lines(run)
    fast = fast_lines(task, paths, run, start.told, rows, lengths, mesh)
    for heading, line in zip(chain(["fast"], repeat("")), fast, strict=False):
        yield f"{heading:<10}{line}"
    yield f"latents   {list(task.latents)}"
    yield f"rows      {rows}"


def _guidance_lines(task: SamplingTask, rows: Rows, run: RunSteps) -> Iterator[str]:
    """Describe how a step calls the model for its predictions."""
    sampling = task.settings.sampling
    if not sampling.guided:
        yield f"guidance  none: {_computed(run.steps)}"
        return
    how = "one call of the model for both" if rows.calls == 2 else "one call after the other"
    if rows.calls == 2 and rows.ways % 2 == 0:
        how += f", each on half of the {rows.ways} devices of data and fsdp"
    mixes = {step.mix for step in run.steps if step.guidance == "two"}
    how += ", CFG-Zero*" * any(mix.zero_star for mix in mixes)
    how += "".join(f", rescale {mix.rescale:g}" for mix in mixes if mix.rescale)
    yield f"guidance  {sampling.cfg_scale:g}, {how}"
    if sampling.guidance_batched and rows.calls == 1:
        yield "          not in one call: steps of sampling.fast differ between the predictions"


def _experts_lines(run: RunSteps) -> Iterator[str]:
    """Describe which model computes which steps, if there are several."""
    done, several = 0, len(run.experts) > 1
    for expert in run.experts if several else ():
        end = done + expert.steps
        taken = f"steps {done + 1} to {end}" if expert.steps else "no step"
        own = replace(run.steps, steps=run.steps[done:end], guided=run.steps.guided[done:end])
        scale = f"{expert.guidance_scale:g}" if expert.guided else f"none: {_computed(own)}"
        yield f"expert    {expert.part}, {taken}, guidance {scale}"
        done = end
    if several:
        yield "          one at a time on the devices, each read when its turn comes"


def _computed(steps: Steps) -> str:
    return f"{'at most ' * ('?' in steps.letters)}{steps.forwards:g} forwards"


def walk_of(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> Walk:
    """Put the inputs of a run on the devices."""
    seed, count = task.settings.sampling.seed, task.settings.sampling.num_inference_steps
    schedule, renoises = run.sampler.schedule(count), run.sampler.renoises
    told = tuple({name: place(x, mesh) for name, x in part.items()} for part in start.told)
    first = place(np.moveaxis(noise_of(paths, start.rows, task), 1, -1), mesh)
    keys = place(keys_of(seed, start.rows.samples), mesh) if renoises else None
    wanted = start.rows.wanted
    return Walk(task, told, first, schedule, run.steps, keys=keys, mesh=mesh, wanted=wanted)


def _sampled(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> np.ndarray:
    """Run the steps of one model after another; load each model before its first step."""
    with walk_of(task, paths, start, run, mesh) as walk:
        for expert in (e for e in run.experts if e.steps):
            model = load(task, paths, mesh, expert.part)
            walk.take(model, expert)
            del model  # before the next is loaded: a device may have room for one
        for line in walk.outcome():
            print(line)
    latents = hosts.whole(task.finished(walk.state.x, walk.told[-1]))
    print(f"{start.rows.wanted} samples in {walk.bar.seconds:.1f} s of {walk.bar.steps} steps")
    return np.moveaxis(latents, -1, 1)[: start.rows.wanted]


def _write(task: SamplingTask, paths: Paths, latents: np.ndarray) -> None:
    if paths.latents is not None:
        arrays = {"latents": np.asarray(jnp.asarray(latents, jnp.float32))}
        print(files.write(paths.latents, arrays, str(paths.model)))
    if paths.out is None:
        return
    began = time.perf_counter()
    for path in task.write(task.pixels(paths.model, latents), paths.out):
        print(path)
    device = task.settings.sampling.torch_device
    print(f"decoded on {device} in {time.perf_counter() - began:.1f} s")
