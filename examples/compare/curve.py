"""How what the layers add changes from step to step: the curve that MagCache's schedules are from.

    ratio of step i = mean over tokens and clips of |r_i| / |r_(i-1)|,  r_i what the layers added

Source: Ma et al. 2025, https://arxiv.org/abs/2506.09045.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fast.steps import Planned, Step
from jaxtyping import Float
from samplers import State

from .runs import Runner

Ratios = Float[np.ndarray, "steps predictions"]


def ratios(runner: Runner) -> Ratios:
    """Run dense sampling, and return the ratios of each step.

    Those of the prediction with the text come first, then without it. The first step of each model
    has the ratio 1.
    """
    experts = [expert for expert in runner.steps.experts if expert.steps]
    guided = [expert.guided for expert in experts for _ in range(expert.steps)]
    begins = {sum(x.steps for x in experts[:n]) for n in range(len(experts))}
    kinds = (Step(guidance="guided" if x else "none", keeps=True) for x in guided)
    runner.walk.planned = tuple(Planned(kind) for kind in kinds)
    before: dict[str, Any] = {}
    found: list[dict[str, float]] = []

    def observe(i: int, state: State) -> State:
        here = _apart(runner.walk.memory.added[0], len(state.x))
        last = {} if i in begins else before
        found.append({k: float(_ratio(x, last[k])) if k in last else 1.0 for k, x in here.items()})
        before.clear()
        before.update(here)
        return state

    runner.taken(observe)
    names = ("with", "without") if any(guided) else ("with",)
    return np.array([[row.get(name, row["with"]) for name in names] for row in found])


def _apart(added: Mapping[str, Any], samples: int) -> dict[str, Any]:
    """Return what the layers added in each prediction; a call of both ends with the text."""
    arrays = {name: jax.tree.leaves(x)[0] for name, x in added.items()}
    if "both" in arrays:
        return {"with": arrays["both"][-samples:], "without": arrays["both"][:samples]}
    return arrays


@jax.jit
def _ratio(ours: Any, before: Any) -> Any:
    norm, last = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (ours, before))
    return jnp.mean(norm / jnp.maximum(last, 1e-30))
