"""Resolve what each step of a run computes, from settings and facts to one value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import maxattn as ma
from maxattn import sharding
from maxattn.errors import ConfigError, MaxattnError
from maxattn.steps import Step, Steps, resolve
from maxattn_examples.common.compiled import split
from maxattn_examples.samplers import keys_of, start
from maxattn_examples.samplers.sampler import Sampler

from .facts import curve_facts, weights_facts
from .fast import FastSettings, with_curve
from .files import Paths
from .rows import Rows
from .task import Arrays, Expert, SamplingTask

FEW = 8  # with fewer steps, those that must compute leave next to nothing
Overrides = tuple[tuple[str, Any], ...]


class RunSteps(NamedTuple):
    """The steps of a run.

    Args:
        experts: the models, in the order of their steps.
        steps: what each step computes.
    """

    sampler: Sampler
    experts: tuple[Expert, ...]
    steps: Steps


def resolved(task: SamplingTask, paths: Paths, divides: bool = True) -> RunSteps:
    """Resolve what each step of a run computes.

    Args:
        paths: of the weights, which a curve depends on.
        divides: whether the prompts' batch rows divide evenly over the devices. If not, an expert
            without guidance is called with the negative prompt's rows too.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    sampling, sampler = task.settings.sampling, task.sampler()
    experts = task.experts(sampler.schedule(sampling.num_inference_steps).times)
    experts = tuple(x if divides else x._replace(guided=sampling.guided) for x in experts)
    given = [sampling.fast] if second_of(task) is None else [sampling.fast, second_of(task)]
    count = sampling.num_inference_steps
    for key, fast in zip(("fast", "fast_2"), given, strict=False):
        if fast is not None and fast.preset is not None and count < FEW:
            rule = f"it saves almost nothing in fewer than {FEW} steps, and the run has {count}"
            raise ConfigError(f"sampling.{key}.preset", fast.preset, rule, "leave it out")
    facts = partial(curve_facts, task, sampler, paths)
    each = [with_curve(fast, facts) for fast in given]
    settings = each if len(each) > 1 else each[0]
    counts, guided = [x.steps for x in experts], [x.guided for x in experts]
    steps = resolve(settings, counts, task.layers, guided, setting="sampling.fast")
    return RunSteps(sampler, experts, steps)


def second_of(task: SamplingTask) -> FastSettings | None:
    """Return the second transformer's own settings, or None."""
    return getattr(task.settings.sampling, "fast_2", None)


def predicts_both(task: SamplingTask) -> bool:
    """Check whether a step computes both predictions in one call."""
    return task.settings.sampling.guidance_batched and not predicts_apart(task)


def predicts_apart(task: SamplingTask) -> bool:
    """Check whether guidance skips steps, or one prediction skips layers."""
    found = (task.settings.sampling.fast, second_of(task))
    guidance = [x.guidance for x in found if x is not None and x.guidance is not None]
    return any((how.start, how.stop) != (0, 1) or how.skip is not None for how in guidance)


def with_attention(task: SamplingTask, overrides: Overrides) -> SamplingTask:
    """Return the task with other attention settings.

    Raises:
        ConfigErrors: its own settings contradict them.
    """
    changed: Any = task
    return replace(changed, settings=task.settings.replace(**dict(overrides)))


def plans_of(
    task: SamplingTask, steps: Steps, rows: int, lengths: Mapping[str, int], mesh: Any
) -> Iterator[ma.Plan]:
    """Yield the plans of a run: as configured, then those of self-attention that steps replace.

    Args:
        rows: batch rows of a model call.
        lengths: tokens of text and image.

    Raises:
        MaxattnError: a kernel that the user named cannot run.
    """
    yield from task.plans(rows, lengths, mesh).values()
    for overrides in dict.fromkeys(step.attention for step in steps if step.attention):
        plans = with_attention(task, overrides).plans(rows, lengths, mesh)
        yield from (plan for plan in plans.values() if plan.call.role == "self")


def attention_seconds(
    task: SamplingTask, steps: Steps, rows: Rows, lengths: Mapping[str, int], mesh: Any
) -> tuple[float, float] | None:
    """Estimate the seconds of self-attention in a run, and in one without `sampling.fast`.

    Returns:
        None if a kernel has no estimate, or if attention differs between layers.
    """
    forward: dict[Overrides, float] = {}
    for overrides in {(), *(step.attention for step in steps)}:
        own = with_attention(task, overrides) if overrides else task
        plans = own.plans(rows.samples * rows.calls, lengths, mesh).values()
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


def fast_lines(
    task: SamplingTask,
    paths: Paths,
    run: RunSteps,
    told: tuple[Arrays, ...],
    rows: Rows,
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
) -> Iterator[str]:
    """Describe which steps compute and reuse, their memory, and the known loss of accuracy."""
    table = run.steps.table(kept_bytes=kept_bytes(task, run, told, rows, mesh))
    if not table:
        return
    yield from table.splitlines()
    try:
        seconds = attention_seconds(task, run.steps, rows, lengths, mesh)
    except MaxattnError:
        seconds = None
    if seconds is not None:
        yield "self-attention takes {:.3g} s instead of {:.3g} s, by estimates".format(*seconds)
    fast = task.settings.sampling.fast
    if fast is not None and fast.preset is not None:
        yield f"preset {fast.preset}" + ("" if fast.cache else ", without its cache")
    found = weights_facts(task, paths)["checkpoint"]
    weights = "these weights" if found is None else f"weights {found}"
    yield f"what this costs on {weights} is not known: examples/compare.py measures it"


def kept_bytes(
    task: SamplingTask,
    run: RunSteps,
    told: tuple[Arrays, ...],
    rows: Rows,
    mesh: jax.sharding.Mesh | None,
) -> int:
    """Return the most bytes per device that a run saves between two steps, without running it."""
    from .loop import Inputs, take

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
    noise = jax.ShapeDtypeStruct((rows.samples, *task.latents[1:], task.latents[0]), jnp.float32)
    keys = None if schedule.fresh is None else keys_of(0, rows.samples)
    state = jax.eval_shape(start, schedule, noise, keys)
    alone = ({name: x[-rows.samples :] for name, x in told[-1].items()},)

    def left(step: Step, kept: Any, leaves: Any, state: Any, told: Any, alone: Any) -> Any:
        model = structure.merge(leaves)
        what = told if step.guidance == "two" else alone
        known = tuple(task.told(model, each) for each in what)
        own = replace(step, attention=())
        given = Inputs(schedule, jnp.int32(0), state, known, jnp.float32(1), own)
        return take(partial(task.predict, model), given, kept)[1]

    with ma.Target.named("cpu").assumed():
        size = partial(_on_device, mesh=mesh)
        return run.steps.memory(left, leaves, state, told, alone, size=size)


def _on_device(x: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh | None) -> int:
    """Return an array's bytes on one device: its share of the batch, and of tokens."""
    parts, size = sharding.mesh_shape(mesh), x.size * x.dtype.itemsize
    for n, letter in zip(x.shape, "BT" if x.ndim == 3 else "B", strict=False):
        ways = sharding.ways(letter, parts)
        size //= ways if n % ways == 0 else 1
    return size
