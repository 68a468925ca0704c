"""What each step of a run computes, as its task and settings say."""

from __future__ import annotations

from fast.curves import Facts
from fast.steps import Planned, plan_steps
from samplers import flow_euler
from samplers.read import Sampler

from .paths import Paths
from .task import SamplingTask


def planned_steps(task: SamplingTask, sampler: Sampler, paths: Paths) -> tuple[Planned, ...]:
    """Decide what each step computes.

    Args:
        task: the model's.
        sampler: of the run.
        paths: of its weights.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    sampling = task.settings.sampling
    schedule = sampler.schedule(sampling.num_inference_steps)
    experts = [expert.steps for expert in task.experts(schedule.times)]
    weights, count = paths.weights_of(task.part), len(experts)
    facts = Facts(sampler.name, _shift_of(sampler), vars(task.sizes), weights, count)
    return plan_steps(sampling.fast, experts, sampling.cfg_scale != 1, task.layers, facts)


def predicts_both(task: SamplingTask) -> bool:
    """Check whether both predictions of a step are rows of one call.

    They are not if some steps predict once, or skip layers in one prediction: each then has a call.
    """
    sampling = task.settings.sampling
    return sampling.guidance_batched and not predicts_apart(task)


def predicts_apart(task: SamplingTask) -> bool:
    """Check whether `sampling.fast` asks for predictions that cannot share a call."""
    fast = task.settings.sampling.fast
    how = None if fast is None else fast.guidance
    return how is not None and ((how.start, how.stop) != (0, 1) or how.skip is not None)


def _shift_of(sampler: Sampler) -> float | None:
    """Return the shift of a sampler's times, where it has one."""
    options = sampler.options
    if sampler.family == "even_flow":
        return flow_euler.shift_of(options, sampler.tokens)
    return options.get("flow_shift", options.get("shift"))
