"""One step of a run as a program, for each kind of step; and what a run keeps between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from common.scan import Around
from jaxtyping import Array
from samplers import Schedule, State, step

from .guidance import Both, gated
from .reuse import Added, hook_of
from .settings import GuidanceSettings
from .steps import Planned, Step

# The model: of samples, times, what it is told, and a hook around its layers.
Model = Callable[[Array, Array, Any, Around | None], Array]


class Made(NamedTuple):
    """What a step makes beside the sample.

    Args:
        added: what the layers added, in each of its calls; empty if it keeps nothing.
        difference: of its two predictions, where it is kept for a gate.
    """

    added: tuple[Added, ...] = ()
    difference: Array | None = None


class Kept(NamedTuple):
    """What a step takes from earlier ones.

    Args:
        weights: of `added`.
        added: by the layers, the newest step first, in each of its calls.
        difference: of the two predictions of a guided step, for a gate.
    """

    weights: tuple[Array, ...] = ()
    added: tuple[tuple[Added, ...], ...] = ()
    difference: Array | None = None


@dataclass
class Memory:
    """What a run keeps between steps, on the devices.

    Args:
        order: of the line through what was kept, 0 or 1.
        added: by the layers in the last computed steps, the newest first.
        difference: of the last two predictions.
    """

    order: int = 0
    added: list[tuple[Added, ...]] = field(default_factory=list)
    difference: Array | None = None

    def before(self, planned: Planned) -> Kept:
        """Return what a step takes, and forget what neither it nor a later one takes."""
        if planned.step.layers == "compute":
            del self.added[self.order :]
        weights = tuple(jnp.float32(x) for x in planned.weights)
        difference = self.difference if planned.step.guidance == "gate" else None
        return Kept(weights, tuple(self.added[: len(weights)]), difference)

    def after(self, made: Made) -> None:
        """Keep what a step made."""
        if made.added:
            self.added.insert(0, made.added)
        if made.difference is not None:
            self.difference = made.difference


class Inputs(NamedTuple):
    """What a step takes beside parameters; a pytree.

    Args:
        schedule: of the sampler.
        i: the number of the step.
        state: of the sampler.
        told: what the model is told, for each call: of both rows, or without the text and with it.
            A step that predicts once takes the last.
        scale: of guidance.
        kept: by earlier steps.
    """

    schedule: Schedule
    i: Array
    state: State
    told: tuple[Any, ...]
    scale: Array
    kept: Kept


def take(model: Model, kind: Step, how: GuidanceSettings, given: Inputs) -> tuple[State, Made]:
    """Take a step of a kind.

    Args:
        model: called once or twice.
        kind: of the step.
        how: two predictions are mixed.
        given: the operands.
    """
    kept: list[Added] = []
    differences: list[Array] = []

    def predict(x: Array, t: Array) -> Array:
        if kind.guidance == "zero":
            return jnp.zeros_like(x)
        if kind.guidance != "guided":
            with_ = _call(model, kind, kept, given, (x, t, given.told[-1], -1))
            if given.kept.difference is None:
                return with_
            return gated(with_, given.kept.difference, given.scale, how.rescale)
        if len(given.told) == 2:
            ats = ((x, t, what, number) for number, what in enumerate(given.told))
            both = Both(*(_call(model, kind, kept, given, at) for at in ats))
        else:
            rows = _call(model, kind, kept, given, (jnp.concatenate([x, x]), t, given.told[0], 0))
            both = Both(*jnp.split(rows, 2))
        if kind.keeps_difference:
            differences.append(both.with_ - both.without)
        return both.mixed(given.scale, how)

    state = step(given.schedule, given.i, given.state, predict)
    return state, Made(tuple(kept), differences[0] if differences else None)


def _call(
    model: Model, kind: Step, kept: list[Added], given: Inputs, at: tuple[Array, Array, Any, int]
) -> Array:
    """Call the model; `at` has samples, a time, what it is told, and the number of the call."""
    x, t, what, number = at
    # A step that predicts once may follow one of both: the last rows are those with the text.
    rows = [jax.tree.map(lambda a: a[-len(x) :], each[number]) for each in given.kept.added]
    around = hook_of(kind, kept, rows, given.kept.weights)
    return model(x, jnp.broadcast_to(t, x.shape[:1]), what, around).astype(jnp.float32)
