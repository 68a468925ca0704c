"""Steps with a kernel of their own: the task and the model under another attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from flax import nnx

import maxattn as ma
from maxattn import sharding
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError
from maxattn_examples.common.split import Structure, split
from maxattn_examples.fast.settings import is_setting
from maxattn_examples.fast.steps import Planned

from .rows import Rows
from .task import SamplingTask

Kernel = str | None


def kernels_of(planned: Sequence[Planned]) -> tuple[Kernel, ...]:
    """Return the kernels of a run's steps, each once, in the order of the steps."""
    return tuple(dict.fromkeys(x.step.kernel for x in planned))


def with_kernel(task: SamplingTask, kernel: Kernel) -> SamplingTask:
    """Return the task whose self-attention has a kernel, and the strategy that it had.

    Args:
        task: of the run.
        kernel: its name; None is that of the settings.

    Raises:
        ConfigErrors: the settings do not go with the kernel.
    """
    if kernel is None:
        return task
    changed: Any = task
    return replace(changed, settings=task.settings.replace(**keys_of(task, kernel)))


def keys_of(task: SamplingTask, kernel: str) -> dict[str, str | None]:
    """Return the settings under which a task's self-attention has a kernel, and its strategy."""
    # Other values of `attention` name a strategy too.
    if not is_setting("attention_kernel", task.settings.attention):
        return {"attention_kernel": kernel}
    named = task.settings.attention_kernel is not None
    return {"attention": kernel, **({"attention_kernel": None} if named else {})}


def structure_with(
    task: SamplingTask, kernel: Kernel, model: Structure, mesh: jax.sharding.Mesh | None
) -> Structure:
    """Return the structure of the model whose steps have a kernel; it takes the same arrays."""
    if kernel is None:
        return model
    other = nnx.eval_shape(lambda: with_kernel(task, kernel).build(mesh, nnx.Rngs(0)))
    found, _ = split(other)
    assert found.tree == model.tree, "a kernel has no parameters"
    return found


def plans_of(
    task: SamplingTask,
    planned: Sequence[Planned],
    rows: int,
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
) -> Iterator[ma.Plan]:
    """Yield the plans of a run: all with the settings' kernel, self-attention with the others.

    The arguments are those of `kernel_names`.
    """
    yield from task.plans(rows, lengths, mesh).values()
    for kernel in kernels_of(planned):
        if kernel is not None:
            plans = with_kernel(task, kernel).plans(rows, lengths, mesh)
            yield from (plan for plan in plans.values() if plan.call.role == "self")


def kernel_names(
    task: SamplingTask,
    planned: Sequence[Planned],
    rows: int,
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
) -> dict[Kernel, str]:
    """Name the kernel that runs in self-attention: the settings', and each that steps ask for.

    Args:
        task: of the run.
        planned: its steps.
        rows: of the model in a call.
        lengths: of text and image, in tokens.
        mesh: that it runs on.

    Raises:
        ConfigErrors: a kernel cannot run.
    """
    found: dict[Kernel, str] = {}
    for kernel in dict.fromkeys((None, *kernels_of(planned))):
        try:
            plans = with_kernel(task, kernel).plans(rows, lengths, mesh)
        except MaxattnError as error:
            if kernel is None:
                raise
            raise ConfigErrors(list(_renamed(error, kernel))) from None
        found[kernel] = _of_self(plans)
    return found


@sharding.inside_auto_axes()
def self_kernel(
    task: SamplingTask, *, rows: int, lengths: Mapping[str, int], mesh: jax.sharding.Mesh | None
) -> str:
    """Name the kernel of the settings that runs in self-attention; arguments of `kernel_names`."""
    return _of_self(task.plans(rows, lengths, sharding.program_mesh(mesh)))


def _of_self(plans: Mapping[str, ma.Plan]) -> str:
    names = (plan.kernel.name for plan in plans.values() if plan.call.role == "self")
    return ", ".join(dict.fromkeys(names))


def attention_seconds(
    task: SamplingTask,
    planned: Sequence[Planned],
    whole: int,
    rows: Rows,
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
) -> tuple[float, float] | None:
    """Estimate how long self-attention takes in a run, and in one without shortcuts.

    Args:
        task: of the run.
        planned: its steps.
        whole: forwards without shortcuts.
        rows: of the batch.
        lengths, mesh: as of `kernel_names`.

    Returns:
        Seconds; None if a kernel has no estimate, or layers differ in their attention.
    """
    forward: dict[Kernel, float] = {}  # of a forward
    for kernel in {None, *kernels_of(planned)}:
        plans = with_kernel(task, kernel).plans(rows.samples * rows.calls, lengths, mesh)
        found = [plan for plan in plans.values() if plan.call.role == "self"]
        if len(found) != 1 or found[0].strategy.name != "none":
            return None
        local = found[0].strategy.local_call(found[0].padded_call)
        times = found[0].kernel.microseconds(local, found[0].target)
        if times is None:
            return None
        forward[kernel] = task.layers * times[0] / 1e6 / rows.calls
    used = sum(x.step.forwards(task.layers) * forward[x.step.kernel] for x in planned)
    return used, whole * forward[None]


def _renamed(error: MaxattnError, kernel: str) -> Iterator[ConfigError]:
    """Yield the problems of a kernel as those of `sampling.fast.kernels`."""
    for problem in error.problems if isinstance(error, ConfigErrors) else [error]:
        rule, remedy = problem.rule, "name another kernel, or leave it out"
        yield ConfigError("sampling.fast.kernels", f"attention {kernel}", rule, remedy)
