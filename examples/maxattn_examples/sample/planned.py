"""What each step of a run computes, as its task and settings say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maxattn import weights
from maxattn.errors import ConfigError
from maxattn_examples.fast.curves import Facts
from maxattn_examples.fast.settings import GuidanceSettings
from maxattn_examples.fast.steps import Planned, plan_steps
from maxattn_examples.samplers import flow_euler
from maxattn_examples.samplers.sampler import Sampler

from .paths import Paths
from .run_weights import weights_of_run
from .task import Expert, SamplingTask


def planned_steps(
    task: SamplingTask, sampler: Sampler, paths: Paths, divides: bool = True
) -> tuple[Planned, ...]:
    """Decide what each step computes.

    Args:
        task: the model's.
        sampler: of the run.
        paths: of its weights.
        divides: as of `experts_of`.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    sampling = task.settings.sampling
    found = experts_of(task, sampler, divides)
    experts, guided = [x.steps for x in found], [x.guided for x in found]

    def states(which: Any) -> list[np.ndarray] | None:
        return states_of(task, found, sampler, paths, which)

    own, shift = weights_of_run(task, paths), shift_of(sampler)
    told = task.embedded_guidance
    facts = Facts(sampler.name, shift, vars(task.sizes), own, len(experts), told, states)
    return plan_steps(sampling.fast, experts, guided, task.layers, facts)


def experts_of(task: SamplingTask, sampler: Sampler, divides: bool) -> tuple[Expert, ...]:
    """Return the models of a run, and their steps.

    Args:
        task: the model's.
        sampler: of the run.
        divides: whether the rows of the prompts alone divide over the devices. Else one of two
            models that has no guidance is called with the rows of both prompts.
    """
    sampling = task.settings.sampling
    experts = task.experts(sampler.schedule(sampling.num_inference_steps).times)
    return tuple(x if divides else x._replace(guided=sampling.guided) for x in experts)


def guidance_of(task: SamplingTask) -> GuidanceSettings:
    """Return how a run mixes the predictions of a step."""
    fast = task.settings.sampling.fast
    return (None if fast is None else fast.guidance) or GuidanceSettings()


def predicts_both(task: SamplingTask) -> bool:
    """Check whether both predictions of a step are rows of one call.

    They are not if some steps predict once, or skip layers in one prediction: each then has a call.
    """
    sampling = task.settings.sampling
    return sampling.guidance_batched and not predicts_apart(task)


def predicts_apart(task: SamplingTask) -> bool:
    """Check whether `sampling.fast` asks for predictions that cannot share a call."""
    how = guidance_of(task)
    return (how.start, how.stop) != (0, 1) or how.skip is not None


def shift_of(sampler: Sampler) -> float | None:
    """Return the shift of a sampler's times, where it has one."""
    options = sampler.options
    if sampler.family == "even_flow":
        return flow_euler.shift_of(options, sampler.tokens)
    return options.get("flow_shift", options.get("shift"))


def states_of(
    task: SamplingTask, experts: Sequence[Expert], sampler: Sampler, paths: Paths, which: Any
) -> list[np.ndarray] | None:
    """Return what each expert makes of the times of its steps, if it makes it of these alone.

    Raises:
        ConfigError: LoRA weights would change it.
    """
    if task.family != "wan":
        return None
    from maxattn_examples.wan.time_states import time_states

    times = np.asarray(sampler.schedule(task.settings.sampling.num_inference_steps).times)
    found, done = [], 0
    for expert in experts:
        own, done = times[done : done + expert.steps], done + expert.steps
        lora = paths.lora_of(expert.part)
        if lora is not None and any("time_" in name for name in weights.SafeTensors(lora)):
            rule = "TeaCache's schedule is of the embedding of times, which this LoRA changes"
            remedy = "write a schedule (sampling.fast.cache.schedule), or merge it into the weights"
            raise ConfigError("--lora", lora, rule, remedy)
        found.append(time_states(paths.weights_of(expert.part), task.sizes, own, which))
    return found
