"""A run of sampling: check everything, read weights, run the steps, write files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma
from maxattn import sharding
from maxattn.errors import ConfigError
from maxattn.steps import Step, Steps
from maxattn_examples import samplers
from maxattn_examples.common import hosts
from maxattn_examples.common.compiled import split

from . import inputs
from .check import check, check_plan
from .inputs import Paths, Rows, assumed, assumed_lengths, batch_ways, noise, place, told_in_rows
from .loop import Inputs, Walk, take
from .resolve import (
    Overrides,
    RunSteps,
    plans_of,
    predicts_both,
    resolved,
    weights_facts,
    with_attention,
)
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
    arrays = assumed(task) if given is None else inputs.read(given, "--embeddings")
    return _told(task, arrays, mesh)


def start_of(task: SamplingTask, paths: Paths, mesh: Mesh | None) -> Start:
    """Read or encode the model's conditions."""
    return _told(task, arrays_of(task, paths), mesh)


def _told(task: SamplingTask, arrays: Arrays, mesh: Mesh | None) -> Start:
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
        return inputs.read(paths.embeddings, "--embeddings")
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
    given = inputs.read(paths.noise, "--noise")["noise"].astype(np.float32)
    if len(given) != rows.wanted:
        value = f"{paths.noise}: {len(given)} rows"
        rule = f"one for each of the {rows.wanted} samples"
        raise ConfigError("--noise", value, rule, "set sampling.per_prompt, or make it anew")
    return given[np.resize(np.arange(rows.wanted), rows.samples)]


def _opening(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> Iterator[str]:
    sampling, rows = task.settings.sampling, start.rows
    for plan in plans_of(task, run.steps, rows.samples * rows.calls, start.lengths, mesh):
        yield plan.explain()
    if (row := sampling.distilled_as) is not None:
        yield f"distilled {row.name}: {row.of}"
    yield f"sampler   {run.sampler}, {sampling.num_inference_steps} steps"
    yield from _guidance_lines(task, rows, run)
    yield from _experts_lines(run)
    fast = _fast_lines(task, paths, start, run, mesh)
    for heading, line in zip(chain(["fast"], repeat("")), fast, strict=False):
        yield f"{heading:<10}{line}"
    yield f"latents   {list(task.latents)}"
    yield f"rows      {rows}"


def _guidance_lines(task: SamplingTask, rows: Rows, run: RunSteps) -> Iterator[str]:
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


def _fast_lines(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> Iterator[str]:
    table = run.steps.table(kept_bytes=_kept_bytes(task, start, run, mesh))
    if not table:
        return
    yield from table.splitlines()
    seconds = _attention_seconds(task, start, run.steps, mesh)
    if seconds is not None:
        yield "self-attention takes {:.3g} s instead of {:.3g} s, by estimates".format(*seconds)
    fast = task.settings.sampling.fast
    if fast is not None and fast.preset is not None:
        yield f"preset {fast.preset}" + ("" if fast.cache else ", without its cache")
    found = weights_facts(task, paths)
    lora = [f"LoRA {each}" for each in found.pop("lora")]
    hashes = [each for each in found.values() if each is not None]
    weights = ", ".join(["weights " + " and ".join(hashes) if hashes else "these weights", *lora])
    yield f"what this costs on {weights} is not known: examples/compare.py measures it"


def _attention_seconds(
    task: SamplingTask, start: Start, steps: Steps, mesh: Mesh | None
) -> tuple[float, float] | None:
    """Estimate the seconds of self-attention in a run, and in one without `sampling.fast`.

    Returns:
        None if a kernel has no estimate, or if attention differs between layers.
    """
    forward: dict[Overrides, float] = {}
    rows = start.rows
    for overrides in {(), *(step.attention for step in steps)}:
        own = with_attention(task, overrides) if overrides else task
        plans = own.plans(rows.samples * rows.calls, start.lengths, mesh).values()
        found = [plan for plan in plans if plan.call.role == "self"]
        if len(found) != 1 or found[0].strategy.name != "none":
            return None
        local = found[0].strategy.local_call(found[0].padded_call)
        times = found[0].kernel.microseconds(local, found[0].target)
        if times is None:
            return None
        forward[overrides] = task.layers * times[0] / 1e6 / rows.calls
    used = sum(step.forwards(task.layers) * forward[step.attention] for step in steps)
    return used, steps.whole * forward[()]


def _kept_bytes(task: SamplingTask, start: Start, run: RunSteps, mesh: Mesh | None) -> int:
    """Return the most bytes per device that a run saves between two steps, without running it."""
    if not any(step.keeps for step in run.steps):
        return 0
    settings: Any = task.settings
    # Scanned layers are traced once, and shapes do not depend on kernels.
    plain = {"attention": "auto", "attention_kernel": None, "cross_attention": "auto"}
    scanned = settings.replace(model=settings.model.replace(scan_layers=True), **plain)
    changed: Any = task
    task = replace(changed, settings=scanned)
    structure, leaves = split(nnx.eval_shape(lambda: task.build(mesh, nnx.Rngs(0))))
    schedule = run.sampler.schedule(task.settings.sampling.num_inference_steps)
    rows, (channels, *size) = start.rows.samples, task.latents
    noise = jax.ShapeDtypeStruct((rows, *size, channels), jnp.float32)
    keys = None if schedule.fresh is None else samplers.keys_of(0, rows)
    state = jax.eval_shape(samplers.start, schedule, noise, keys)
    alone = ({name: x[-rows:] for name, x in start.told[-1].items()},)

    def left(step: Step, kept: Any, leaves: Any, state: Any, told: Any, alone: Any) -> Any:
        model = structure.merge(leaves)
        what = told if step.guidance == "two" else alone
        known = tuple(task.told(model, each) for each in what)
        own = replace(step, attention=())
        given = Inputs(schedule, jnp.int32(0), state, known, jnp.float32(1), own)
        return take(partial(task.predict, model), given, kept)[1]

    with ma.Target.named("cpu").assumed():
        on_device = partial(_on_device, mesh=mesh)
        return run.steps.memory(left, leaves, state, start.told, alone, size=on_device)


def _on_device(x: jax.ShapeDtypeStruct, mesh: Mesh | None) -> int:
    """Return an array's bytes on one device: its share of the batch, and of tokens."""
    parts, size = sharding.mesh_shape(mesh), x.size * x.dtype.itemsize
    for n, letter in zip(x.shape, "BT" if x.ndim == 3 else "B", strict=False):
        ways = sharding.ways(letter, parts)
        size //= ways if n % ways == 0 else 1
    return size


def walk_of(
    task: SamplingTask, paths: Paths, start: Start, run: RunSteps, mesh: Mesh | None
) -> Walk:
    """Put the inputs of a run on the devices."""
    seed, count = task.settings.sampling.seed, task.settings.sampling.num_inference_steps
    schedule, renoises = run.sampler.schedule(count), run.sampler.renoises
    told = tuple({name: place(x, mesh) for name, x in part.items()} for part in start.told)
    first = place(np.moveaxis(noise_of(paths, start.rows, task), 1, -1), mesh)
    keys = place(samplers.keys_of(seed, start.rows.samples), mesh) if renoises else None
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
        print(inputs.write(paths.latents, arrays, str(paths.model)))
    if paths.out is None:
        return
    began = time.perf_counter()
    for path in task.write(task.pixels(paths.model, latents), paths.out):
        print(path)
    device = task.settings.sampling.torch_device
    print(f"decoded on {device} in {time.perf_counter() - began:.1f} s")
