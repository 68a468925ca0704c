"""Runs of a small model, step by step, as the loop of a program takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from maxattn_examples.fast.program import Inputs, Memory, Model, take
from maxattn_examples.fast.settings import FastSettings, GuidanceSettings
from maxattn_examples.fast.steps import plan_steps
from maxattn_examples.samplers import Schedule, start

TAKE = jax.jit(take, static_argnums=(0, 1, 2))


class Run:
    """What is drawn: a model that is told two texts, from noise.

    Args:
        model: as `fast.program` calls it.
        layers: of it.
        told: in each call of a step.
    """

    def __init__(self, model: Model, layers: int, told: tuple[Any, ...]) -> None:
        self.model, self.layers, self.told = model, layers, told

    def samples(
        self, fast: FastSettings, schedule: Schedule, noise: Any, scale: float
    ) -> Iterator[Any]:
        """Yield the sample after each step."""
        state, memory = start(schedule, noise), Memory(1)
        steps = len(schedule.times)
        for i, planned in enumerate(plan_steps(fast, (steps,), scale != 1, self.layers)):
            what = self.told if planned.step.guidance == "guided" else self.told[-1:]
            kept = memory.before(planned)
            given = Inputs(schedule, jnp.int32(i), state, what, jnp.float32(scale), kept)
            how = fast.guidance or GuidanceSettings()
            state, made = TAKE(self.model, planned.step, how, given)
            memory.after(made)
            yield state.x
