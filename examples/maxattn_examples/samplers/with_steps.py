"""A sampling loop in which each step computes, reuses or is guided as `maxattn.steps` resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.errors import InputError
from maxattn.steps import Added, Kept, Step, Steps, guided
from maxattn.steps.value import BOTH, WITH, WITHOUT

PredictOf = Callable[[Array, Array, str], Array]
"""From samples, a time and the name of a prediction ("with", "without", "third", "both")."""


class Guided:
    """The guided predictions of all steps, with sums saved between steps, for one compiled loop.

    Args:
        steps: what each step computes.
        scale: of guidance.
        batched: whether both predictions are one call, "both", with twice the batch rows.
    """

    def __init__(self, predict: PredictOf, steps: Steps, scale: Any, batched: bool) -> None:
        self.predict, self.scale, self.batched = predict, scale, batched
        found = [*_kinds(steps, batched)]
        order = [*dict.fromkeys(found)]
        self.kinds = [(steps[found.index(kind)], kind[1]) for kind in order]
        numbers = [_numbers(step) for step in steps]
        self.rows = (
            jnp.asarray([order.index(kind) for kind in found]),
            jax.tree.map(lambda *x: jnp.asarray(np.asarray(x)), *numbers),
        )

    def kept(self, x: Array) -> Kept:
        """Return zeros for the sums of every kind of step, which fix the scan's carry."""
        found: dict[str, Added] = {}
        for kind, _ in self.kinds:
            if kind.keeps and kind.layers == "compute":
                made = jax.eval_shape(partial(self._made, kind, {}), x, jnp.float32(0))[1]
                found |= {
                    name: added._replace(
                        sums=tuple(own[:1] * kind.keeps for own in added.sums),
                        computed=None if added.decision is None else jnp.array(True),
                    )
                    for name, added in made.items()
                }
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)

    def __call__(self, row: Any, kept: Kept, x: Array, t: Array) -> tuple[Array, Kept]:
        """Return a step's guided prediction, and the sums saved after it."""
        which, numbers = row

        def branch(kind: Step, takes_both: bool, kept: Kept) -> tuple[Array, Kept]:
            weights = tuple(numbers["weights"][n] for n in range(len(kind.weights)))
            own = replace(kind, **{**numbers, "weights": weights})
            stale = (WITH, WITHOUT) if takes_both else (BOTH,)
            taken = {name: added for name, added in kept.items() if name not in stale}
            v, left = self._made(own, taken, x, t)
            return v.astype(jnp.float32), {k: _like(left.get(k), old) for k, old in kept.items()}

        branches = [partial(branch, *kind) for kind in self.kinds]
        if len(branches) == 1:
            return branches[0](kept)
        return jax.lax.switch(which, branches, kept)

    def _made(self, step: Step, kept: Kept, x: Array, t: Array) -> tuple[Array, Kept]:
        if not step.predictions:
            return jnp.zeros_like(x), {}

        def call(name: str) -> Array:
            return self.predict(x, t, name)

        return guided(step, kept, call, self.scale, batched=self.batched)


def _kinds(steps: Steps, batched: bool) -> Iterator[tuple[Any, bool]]:
    """Yield each step's structure, and whether its sums are of both predictions."""
    takes_both = False
    for step in steps:
        yield jax.tree.structure(step), takes_both
        if step.layers != "reuse" and step.keeps:
            takes_both = batched and step.guidance == "two" and not step.skipped_in(WITHOUT)


def check_steps(steps: Steps | None, count: int, scale: Any) -> None:
    """Refuse steps whose number differs from the schedule's, and an unused scale."""
    if scale is not None and not any(step.guidance == "two" for step in steps or ()):
        rule, remedy = "no step is guided", "resolve steps with guided=True, and give them as steps"
        raise InputError("scale", "given", rule, remedy)
    if steps is not None and len(steps) != count:
        rule = f"the schedule has {count} steps"
        raise InputError("steps", f"{len(steps)} steps", rule, f"resolve them for {count} steps")


def _numbers(step: Step) -> Mapping[str, Any]:
    weights = np.zeros(2, np.float32)
    weights[: len(step.weights)] = step.weights
    own = {"threshold": np.float32(step.threshold), "number": np.int32(step.number)}
    return {"weights": weights, "most": np.int32(step.most), **own}


def _like(new: Added | None, old: Added) -> Added:
    """Return a step's sums in the shapes of the scan's carry."""
    if new is None:
        return old
    sums = tuple((*n, *o)[: len(o)] for n, o in zip(new.sums, old.sums, strict=True))
    is_decided = old.decision is not None
    decision = old.decision if new.decision is None else new.decision
    computed = (jnp.array(True) if new.computed is None else new.computed) if is_decided else None
    return Added(sums, decision, computed)
