"""Second derivatives and forward mode: right, or refused in maxattn's own words."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from tests.fuzz.calls import call_text, config_text, facts_of, given_of
from tests.fuzz.case import Case, Machine, Names
from tests.fuzz.float64 import Given, Held, attend, hold
from tests.fuzz.kernels import draw_settings
from tests.fuzz.mask_trees import Sizes
from tests.fuzz.operands import draw_operands

LOSS = "loss = lambda q: (call(q, k, v, bias)[0] * dout).sum()\nway = draw(q.shape, 1.0)\n"
HOW = {
    "grad of grad": "got = jax.grad(lambda q: (jax.grad(loss)(q) * way).sum())(q)\n",
    "jvp": "got = jax.jvp(lambda q: call(q, k, v, bias)[0], (q,), (way,))[1]\n",
    "jvp of grad": "got = jax.jvp(jax.grad(loss), (q,), (way,))[1]\n",
}
STEP = 1e-4


def draw_second(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a float32 call and a derivative beyond the first gradient."""
    operands = draw_operands(rng, machine, Sizes(1, 7, 8, 2, rng.choice([1, 2]), 8))
    operands = operands._replace(dtype="float32", values="normal", hidden="", bias_dtype="float32")
    settings, how = draw_settings(rng, machine), rng.choice(list(HOW))
    source = operands.text() + config_text(settings) + call_text(operands) + LOSS + HOW[how]

    def check(names: Names) -> None:
        _hold(names, given_of(operands, names), "out" if how == "jvp" else "dq")

    facts = facts_of(operands, kernel=settings["attention"], how=how)
    return Case("transforms", seed, source, check, facts=facts)


def _hold(names: Names, given: Given, of: str) -> None:
    """Hold a directional derivative to differences of float64."""
    way = np.asarray(names["way"], np.float64)
    slope = _slope(lambda step: attend(_at(given, step * way))[of].want)
    bound = np.full(slope.shape, 2e-3 * max(float(abs(slope).max()), 1e-2))
    hold("got", names["got"], Held(slope, bound), "float32", 1.0)


def _at(given: Given, change: np.ndarray) -> Given:
    return given._replace(q=given.q + change, dlse=given.dlse * 0)


def _slope(f: Callable[[float], np.ndarray]) -> np.ndarray:
    return (f(STEP) - f(-STEP)) / (2 * STEP)
