"""MagCache's curve of a model: how what its layers add grows from step to step of a dense run.

    ratio of step i = mean over tokens and clips of |r_i| / |r_(i-1)|,  r_i what the layers added

Source: Ma et al. 2025, https://arxiv.org/abs/2506.09045.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxattn_examples.samplers import State

from .runner import Runner


def measure(runner: Runner) -> Float[np.ndarray, "steps predictions"]:
    """Run dense sampling once, and return its curve, with the text and then without.

    The first step of each model has ratios of 1.
    """
    steps = runner.walk.steps
    runner.walk.steps = replace(steps, steps=tuple(replace(step, keeps=1) for step in steps))
    begins = {sum(x.steps for x in runner.resolved.experts[:n]) for n in range(2)}
    samples, wanted = runner.start.rows.samples, runner.start.rows.wanted
    before: dict[str, Any] = {}
    found: list[dict[str, float]] = []

    def observe(i: int, state: State) -> State:
        here = _added(runner.walk.kept, samples, wanted)
        last = {} if i in begins else before
        found.append({k: float(_ratio(x, last[k])) if k in last else 1.0 for k, x in here.items()})
        before.clear()
        before.update(here)
        return state

    runner.taken(observe)
    runner.walk.steps = steps
    names = ("with", "without") if any(steps.guided) else ("with",)
    return np.array([[row.get(name, row["with"]) for name in names] for row in found])


def _added(kept: Mapping[str, Any], samples: int, wanted: int) -> dict[str, Any]:
    """Return what the layers added in each prediction, to the rows of the wanted samples."""
    found = {name: jax.tree.leaves(added.sums[0][0])[0] for name, added in kept.items()}
    if "both" in found:
        found = dict(zip(("without", "with"), jnp.split(found["both"], 2), strict=True))
    # Copies: the next step takes the memory of what is kept.
    return {name: jnp.array(x[:samples][:wanted]) for name, x in found.items()}


@jax.jit
def _ratio(ours: Any, before: Any) -> Any:
    norm, last = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (ours, before))
    return jnp.mean(norm / jnp.maximum(last, 1e-30))
