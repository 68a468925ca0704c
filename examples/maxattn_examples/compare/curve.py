"""What step caches are computed from: how a dense run's numbers change from step to step.

    ratio of step i = mean over tokens and clips of |r_i| / |r_(i-1)|,  r_i what the layers added

Source of the ratios: Ma et al. 2025, https://arxiv.org/abs/2506.09045 (MagCache).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxattn.errors import ConfigError
from maxattn_examples.fast.cache_settings import Dynamic, EasyCacheSettings, FirstBlockSettings
from maxattn_examples.fast.deciding import EASYCACHE
from maxattn_examples.fast.steps import Planned, Step
from maxattn_examples.sample.planned import states_of
from maxattn_examples.sample.runner import Runner
from maxattn_examples.samplers import State

Ratios = Float[np.ndarray, "steps predictions"]
Some = Float[np.ndarray, " n"]
MOST = 2**20  # numbers of an array that are kept of each step, spread over it


class Dense(NamedTuple):
    """Numbers of dense runs.

    Args:
        ratios: of each step, with the text, then without. The first step of each model has 1.
        spans: the steps of each model.
        first: what the first layers added in each step, for each call of the model.
        samples: that each step was given.
        predictions: with the text.
        times: what each model makes of the times of its steps, if it is of these alone.
    """

    ratios: Ratios
    spans: Sequence[range]
    first: Mapping[str, Sequence[Some | None]]
    samples: Sequence[Some]
    predictions: Sequence[Some]
    times: Sequence[Float[np.ndarray, "n d"]] | None


def measure(runner: Runner) -> Dense:
    """Run dense sampling twice, and return its numbers."""
    experts = [expert for expert in runner.steps.experts if expert.steps]
    ends = np.cumsum([expert.steps for expert in experts]).tolist()
    spans = [range(end - x.steps, end) for x, end in zip(experts, ends, strict=True)]
    found, first = _of_layers(runner, {span.start for span in spans})
    samples, predictions = _of_model(runner)
    names = ("with", "without") if any(expert.guided for expert in experts) else ("with",)
    ratios = np.array([[row.get(name, row["with"]) for name in names] for row in found])
    task, sampler, paths = runner.task, runner.steps.sampler, runner.paths
    try:
        times = states_of(task, experts, sampler, paths, "embedding")
    except ConfigError:  # LoRA weights change them
        times = None
    return Dense(ratios, spans, first, samples, predictions, times)


def _of_layers(
    runner: Runner, begins: set[int]
) -> tuple[list[dict[str, float]], dict[str, list[Some | None]]]:
    """Return the ratios of each step, and what the first layers added in each."""
    before: dict[str, Any] = {}
    found: list[dict[str, float]] = []
    first: dict[str, list[Some | None]] = {}
    wanted = runner.start.rows.wanted

    def observe(i: int, state: State) -> State:
        kept = _wanted(len(state.x), wanted, runner.walk.memory.added[0])
        for name, call in kept.items():
            first.setdefault(name, [None] * i).append(_some(call.first))
        whole = {name: _sum(jax.tree.leaves(x.added)[0], x.first) for name, x in kept.items()}
        here, last = _apart(whole), {} if i in begins else before
        found.append({k: float(_ratio(x, last[k])) if k in last else 1.0 for k, x in here.items()})
        before.clear()
        before.update(here)
        return state

    _run(runner, FirstBlockSettings(), observe)
    return found, {name: [*x, *[None] * (len(found) - len(x))] for name, x in first.items()}


def _of_model(runner: Runner) -> tuple[list[Some], list[Some]]:
    """Return what the model was given in each step, and its prediction with the text."""
    samples, predictions, wanted = [], [], runner.start.rows.wanted

    def observe(i: int, state: State) -> State:
        kept = _wanted(len(state.x), wanted, runner.walk.memory.added[0][EASYCACHE])
        samples.append(_some(kept.at))
        predictions.append(_some(kept.with_))
        return state

    _run(runner, EasyCacheSettings(), observe)
    return samples, predictions


def _run(runner: Runner, keeps: Dynamic, observe: Any) -> None:
    """Run dense sampling, whose steps keep what those of a cache that decides would."""
    guided = [x.guided for x in runner.steps.experts for _ in range(x.steps)]
    step = Step(keeps=True, decides=keeps)
    runner.walk.planned = tuple(
        Planned(step._replace(guidance="guided" if x else "none")) for x in guided
    )
    runner.taken(observe)


def _wanted(drawn: int, wanted: int, kept: Any) -> Any:
    """Leave out the rows that only fill up the devices, of each prediction of a call."""

    def one(x: Any) -> Any:
        if not x.ndim or drawn == wanted:
            return x
        return jnp.concatenate([x[i : i + wanted] for i in range(0, len(x), drawn)])

    return jax.tree.map(one, kept)


def _apart(added: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the layers added in each prediction; a call of both ends with the text."""
    if "both" in added:
        return dict(zip(("without", "with"), jnp.split(added["both"], 2), strict=True))
    return dict(added)


@jax.jit
def _sum(x: Any, y: Any) -> Any:
    return x.astype(jnp.float32) + y.astype(jnp.float32)


@jax.jit
def _ratio(ours: Any, before: Any) -> Any:
    norm, last = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (ours, before))
    return jnp.mean(norm / jnp.maximum(last, 1e-30))


def _some(x: Any) -> Some:
    """Return numbers of an array, spread over all of its axes."""
    stride = max(1, math.ceil(x.size / MOST))
    while math.gcd(stride, x.size) > 1:
        stride += 1
    return np.asarray(_every(x, stride), np.float32)


@partial(jax.jit, static_argnums=1)
def _every(x: Any, stride: int) -> Any:
    return x.reshape(-1)[::stride]
