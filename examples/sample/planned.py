"""What each step of a run computes, as its task and settings say."""

from __future__ import annotations

from fast.curves import Facts
from fast.steps import Planned, plan_steps
from samplers import flow_euler
from samplers.read import Sampler

from .paths import Paths
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
    weights, count = paths.weights_of(task.part), len(experts)
    facts = Facts(sampler.name, _shift_of(sampler), vars(task.sizes), weights, count)
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
