"""One step of a run as a program, for each kind of step; and what a run keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn_examples.common.scan import Around
from maxattn_examples.samplers import Schedule, State, step

from .cache_settings import EasyCacheSettings
from .deciding import EASYCACHE, Easy, easycache, mean_size
from .guidance import Predictions
from .reuse import Added, Notes, hook_of
from .settings import GuidanceSettings
from .steps import THIRD, Planned, Step

# The model: of samples, times, what it is told, and a hook around its layers.
Model = Callable[[Array, Array, Any, Around | None], Array]


class Made(NamedTuple):
    """What a step makes beside the sample.

    Args:
        added: what the layers added, by the name of the call; empty if it keeps nothing.
        difference: of its two predictions, where it is kept for a gate.
        computed: whether a call computed, by its name, where that was decided.
    """

    added: Mapping[str, Added]
    difference: Array | None = None
    computed: Mapping[str, Array] = {}


class Kept(NamedTuple):
    """What a step takes from earlier ones.

    Args:
        weights: of `added`.
        added: by the layers, the newest step first, by the name of the call.
        difference: of the two predictions of a guided step, for a gate.
        threshold: of a decision; below 0 it is to compute.
    """

    weights: tuple[Array, ...] = ()
    added: tuple[Mapping[str, Added], ...] = ()
    difference: Array | None = None
    threshold: Array | None = None


@dataclass
class Memory:
    """What a run keeps between steps, on the devices.

    Args:
        order: of the line through what was kept, 0 or 1.
        added: by the layers in the last computed steps, the newest first.
        difference: of the last two predictions.
    """

    order: int = 0
    added: list[Mapping[str, Added]] = field(default_factory=list)
    difference: Array | None = None

    @classmethod
    def of(cls, planned: Sequence[Planned]) -> Self:
        """Return the empty memory of a run of these steps."""
        return cls(1 if any(len(x.weights) > 1 for x in planned) else 0)

    def before(self, planned: Planned) -> Kept:
        """Return what a step takes, and forget what neither it nor a later one takes."""
        decides = planned.step.layers == "decide"
        if planned.step.layers == "compute":
            del self.added[self.order :]
        weights = tuple(jnp.float32(x) for x in planned.weights)
        difference = self.difference if planned.step.guidance == "gate" else None
        added = tuple(self.added[: len(weights)])
        if decides:
            self.added.clear()
        threshold = jnp.float32(planned.threshold) if decides else None
        return Kept(weights, added, difference, threshold)

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
            A prediction with the text takes the last.
        scale: of guidance.
        kept: by earlier steps.
        wanted: samples, the first ones, which decide; the others fill up devices. None: all.
    """

    schedule: Schedule
    i: Array
    state: State
    told: tuple[Any, ...]
    scale: Array
    kept: Kept
    wanted: Array | None = None


def take(
    model: Model,
    kind: Step,
    how: GuidanceSettings,
    given: Inputs,
    watch: Callable[[Array], None] | None = None,
) -> tuple[State, Made]:
    """Take a step of a kind.

    Args:
        model: called for each prediction, or once for both.
        kind: of the step.
        how: predictions are mixed.
        given: the operands.
        watch: is given the prediction that the sampler takes, if the model makes one.
    """
    notes = Notes()
    differences: list[Array] = []

    def predict(x: Array, t: Array) -> Array:
        if kind.guidance == "zero":
            return jnp.zeros_like(x)
        found = _decided(model, kind, notes, given, (x, t)).fitted(how)
        if kind.keeps_difference:
            differences.append(found.difference)
        mixed = found.mixed(given.scale, how, given.kept.difference)
        if watch is not None:
            watch(mixed)
        return mixed

    state = step(given.schedule, given.i, given.state, predict)
    return state, Made(notes.added, differences[0] if differences else None, notes.computed)


def _decided(
    model: Model, kind: Step, notes: Notes, given: Inputs, at: tuple[Array, Array]
) -> Predictions:
    """Return predictions: those of the model, or what EasyCache kept, as it decides."""

    def predict() -> Predictions:
        return _predictions(model, kind, notes, given.told, given.kept, at, given.wanted)

    if not isinstance(kind.decides, EasyCacheSettings):
        return predict()
    before: Easy | None = given.kept.added[0][EASYCACHE] if kind.layers == "decide" else None
    if before is not None:
        # Guidance may have ended since.
        _, without, skipping = before.added
        without = without if kind.guidance == "guided" else None
        skipping = skipping if THIRD in kind.predictions else None
        parts = before.added._replace(without=without, skipping=skipping)
        before = before._replace(added=parts)
    mean = partial(mean_size, len(at[0]), given.wanted)
    found, kept, computed = easycache(at[0], predict, before, given.kept.threshold, mean)
    notes.keep(EASYCACHE, kept, computed)
    return found


def _predictions(
    model: Model,
    kind: Step,
    notes: Notes,
    told: tuple[Any, ...],
    kept: Kept,
    at: tuple[Array, Array],
    wanted: Array | None = None,
) -> Predictions:
    """Call the model for the predictions of a step, at samples and a time."""
    (x, t), names = at, kind.predictions
    earlier = () if isinstance(kind.decides, EasyCacheSettings) else kept.added
    mean = partial(mean_size, len(x), wanted)

    def call(name: str, x: Array, what: Any) -> Array:
        added = [_kept_of(name, each, len(x)) for each in earlier]
        around = hook_of(kind, name, notes, (added, kept.weights, kept.threshold), mean)
        return model(x, jnp.broadcast_to(t, x.shape[:1]), what, around).astype(jnp.float32)

    without = None
    if kind.guidance == "guided" and len(told) == 1:
        without, with_ = jnp.split(call("both", jnp.concatenate([x, x]), told[0]), 2)
    else:
        without = call(names[0], x, told[0]) if kind.guidance == "guided" else None
        with_ = call("with", x, told[-1])
    return Predictions(with_, without, call(THIRD, x, told[-1]) if THIRD in names else None)


def _kept_of(name: str, added: Mapping[str, Added], rows: int) -> Added:
    """Return what a call takes of what layers added; the last rows of both are with the text."""
    if name in added:
        return added[name]
    return jax.tree.map(lambda x: x[-rows:], added["both"])


def guided(model: Model, told: tuple[Any, ...], scale: Any) -> Callable[[Array, Array], Array]:
    """Return the guided model as a function of sample and time, of a step without shortcuts.

    Args:
        model: called for each prediction, or once for both.
        told: as of `Inputs`.
        scale: of guidance, a number or traced. The number 1 is the model alone: `told` then has as
            many rows as there are samples.
    """
    alone = not isinstance(scale, Array) and scale == 1
    kind = Step(guidance="none" if alone else "guided")

    def predict(x: Array, t: Array) -> Array:
        found = _predictions(model, kind, Notes(), told, Kept(), (x, t))
        return found.mixed(scale, GuidanceSettings())

    return predict
