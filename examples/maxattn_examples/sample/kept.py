"""The memory that a run keeps between its steps, from the shapes of what they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import maxattn as ma
from maxattn import sharding
from maxattn_examples.common.split import split
from maxattn_examples.fast.program import Inputs, Kept, Made, Memory, take
from maxattn_examples.fast.steps import Planned, Step
from maxattn_examples.samplers import Schedule, start
from maxattn_examples.samplers.schedule import keys_of

from .planned import guidance_of
from .rows import Rows
from .task import Arrays, SamplingTask


def kept_bytes(
    task: SamplingTask,
    planned: Sequence[Planned],
    schedule: Schedule,
    told: tuple[Arrays, ...],
    rows: Rows,
    mesh: jax.sharding.Mesh | None = None,
) -> int:
    """Return the most bytes that a run keeps between two steps, on a device.

    Args:
        task: of the run.
        planned: its steps.
        schedule: of its sampler.
        told: what the model is told, for each call of a step.
        rows: of the batch.
        mesh: devices to draw on.
    """
    if not any(x.step.keeps or x.step.keeps_difference for x in planned):
        return 0
    makes = _Makes(task, schedule, told, rows, mesh)
    memory, most, made = Memory.of(planned), 0, {}
    for each in planned:
        kept, kind = memory.before(each), each.step
        if kind not in made:
            made[kind] = makes(kind, kept)
        memory.after(made[kind])
        held = jax.tree.leaves((memory.added, memory.difference))
        most = max(most, sum(_on_device(x, mesh) for x in held))
    return most


def _on_device(x: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh | None) -> int:
    """Count the bytes of an array that a device has: some rows, and some tokens of [B, T, D]."""
    parts, size = sharding.mesh_shape(mesh), x.size * x.dtype.itemsize
    for n, letter in zip(x.shape, "BT" if x.ndim == 3 else "B", strict=False):
        ways = sharding.ways(letter, parts)
        size //= ways if n % ways == 0 else 1
    return size


class _Makes:
    """What a kind of step makes, in shapes.

    Args:
        task: of the run.
        schedule: of its sampler.
        told: what the model is told.
        rows: of the batch.
        mesh: devices to draw on.
    """

    def __init__(
        self,
        task: SamplingTask,
        schedule: Schedule,
        told: tuple[Arrays, ...],
        rows: Rows,
        mesh: jax.sharding.Mesh | None,
    ) -> None:
        settings: Any = task.settings
        # Scanned layers are traced once, and shapes do not depend on kernels.
        plain = {"attention": "auto", "attention_kernel": None, "cross_attention": "auto"}
        scanned = settings.replace(model=settings.model.replace(scan_layers=True), **plain)
        changed: Any = task
        self.task: SamplingTask = replace(changed, settings=scanned)
        model = nnx.eval_shape(lambda: self.task.build(mesh, nnx.Rngs(0)))
        self.structure, self.leaves = split(model)
        self.told = told
        shape = rows.samples, *task.latents[1:], task.latents[0]
        noise = jax.ShapeDtypeStruct(shape, jnp.float32)
        keys = None if schedule.fresh is None else keys_of(0, rows.samples)
        state = jax.eval_shape(start, schedule, noise, keys)
        self.given = Inputs(schedule, jnp.int32(0), state, told, jnp.float32(1), Kept())

    def __call__(self, kind: Step, kept: Kept) -> Made:
        how, told, rows = guidance_of(self.task), self.told, self.given.state.x.shape[0]
        if kind.guidance != "guided":
            told = ({name: x[-rows:] for name, x in told[-1].items()},)

        def one(leaves: Any, given: Inputs) -> Made:
            model = self.structure.merge(leaves)
            known = tuple(self.task.told(model, what) for what in given.told)
            return take(partial(self.task.predict, model), kind, how, given._replace(told=known))[1]

        with ma.Target.named("cpu").assumed():
            return jax.eval_shape(one, self.leaves, self.given._replace(told=told, kept=kept))
