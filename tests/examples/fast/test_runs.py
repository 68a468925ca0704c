"""Runs with fewer forwards are the sums that they stand for, on one device and on eight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.scan import Layers
from fast.guidance import Predictions
from fast.program import Inputs, Memory, take
from fast.settings import CacheSettings, FastSettings, GuidanceSettings
from fast.steps import plan_steps
from samplers import sample, start, unipc
from samplers import step as take_step

from tests.examples.sample.pipelines import pipeline, run, told

STEPS, SHIFT = 4, 3.0
WEIGHTS = jax.random.normal(jax.random.key(1), (3, 6, 6)) / 3


def layer(x: Any, number: int, t: Any, what: Any) -> Any:
    return x + jnp.tanh(x @ WEIGHTS[number] + what + t / 1000)


def model(x: Any, t: Any, what: Any, around: Any = None) -> Any:
    """Three layers between a first and a last sum, as a transformer's between its embeddings."""
    t = t[:, None]

    def run(x: Any, span: range) -> Any:
        for number in span:
            x = layer(x, number, t, what)
        return x

    x = (around or Layers.all)(Layers(3, run), jnp.sin(x))
    return x * jnp.cos(t)


def walked(fast: FastSettings, told: tuple[Any, ...], scale: float) -> Any:
    """Take the steps of a run as a program does."""
    schedule, noise = unipc.schedule(STEPS, SHIFT), jax.random.normal(jax.random.key(0), (2, 6))
    state, memory = start(schedule, noise), Memory(1)
    for i, planned in enumerate(plan_steps(fast, (STEPS,), scale != 1, 3)):
        what = told if planned.step.guidance == "guided" else told[-1:]
        kept = memory.before(planned)
        given = Inputs(schedule, jnp.int32(i), state, what, jnp.float32(scale), kept)
        how = fast.guidance or GuidanceSettings()
        state, made = jax.jit(lambda g, s=planned.step, how=how: take(model, s, how, g))(given)
        memory.after(made)
    return state.x


CALLS = jnp.full((2, 6), 0.3), jnp.full((2, 6), -0.4)


def test_without_shortcuts_a_run_is_that_of_the_sampler() -> None:
    schedule, noise = unipc.schedule(STEPS, SHIFT), jax.random.normal(jax.random.key(0), (2, 6))

    def guided(x: Any, t: Any) -> Any:
        u, c = (model(x, jnp.broadcast_to(t, 2), what) for what in CALLS)
        return u + 4.0 * (c - u)

    want = sample(guided, noise, schedule)
    got = walked(FastSettings(), CALLS, 4.0)
    np.testing.assert_allclose(got, want, atol=1e-5)
    both = (jnp.concatenate(CALLS),)
    np.testing.assert_allclose(walked(FastSettings(), both, 4.0), want, atol=1e-5)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("layers", [None, (1, 3)])
def test_a_reused_step_adds_what_the_layers_added(order: int, layers: Any) -> None:
    """Against a loop that keeps what the layers added by itself, for both predictions."""
    schedule = unipc.schedule(STEPS, SHIFT)
    noise = jax.random.normal(jax.random.key(0), (2, 6))
    first, last = layers or (0, 3)
    kept: dict[int, list[Any]] = {0: [], 1: []}
    letters, step = "XX.X", {"i": 0}

    def one(x: Any, t: Any, number: int) -> Any:
        tt, what = jnp.broadcast_to(t, (2, 1)), CALLS[number]
        x = jnp.sin(x)
        for n in range(first):
            x = layer(x, n, tt, what)
        if letters[step["i"]] == "X":
            y = x
            for n in range(first, last):
                y = layer(y, n, tt, what)
            kept[number].insert(0, y - x)
        else:
            new, old = kept[number][:2]
            y = x + (new if order == 0 else 2 * new - old)
        for n in range(last, 3):
            y = layer(y, n, tt, what)
        return y * jnp.cos(tt)

    state = start(schedule, noise)
    for i in range(STEPS):
        step["i"] = i

        def guided(x: Any, t: Any) -> Any:
            u, c = (one(x, t, number) for number in (0, 1))
            return u + 4.0 * (c - u)

        state = take_step(schedule, i, state, guided)
    fast = FastSettings(cache=CacheSettings(schedule=letters, order=order, layers=layers))
    for calls in (CALLS, (jnp.concatenate(CALLS),)):
        np.testing.assert_allclose(walked(fast, calls, 4.0), state.x, rtol=1e-4, atol=1e-5)


def test_a_gate_at_the_end_changes_nothing() -> None:
    plain = walked(FastSettings(), CALLS, 4.0)
    never = FastSettings(guidance=GuidanceSettings(stop=1.0, after="gate"))
    assert np.array_equal(walked(never, CALLS, 4.0), plain)


def test_zero_star_is_the_projection_of_one_prediction_on_the_other() -> None:
    u, c = jax.random.normal(jax.random.key(3), (2, 5, 7, 3))
    how = GuidanceSettings(zero_star=True)
    got = Predictions(c, u).fitted(how).mixed(3.0, how)
    wide = [np.asarray(x, np.float64) for x in (u, c)]
    for n in range(5):
        u64, c64 = wide[0][n], wide[1][n]
        fitted = u64 * (c64 * u64).sum() / (u64**2).sum()
        np.testing.assert_allclose(got[n], fitted + 3 * (c64 - fitted), rtol=2e-5, atol=2e-5)


def test_a_rescaled_prediction_has_the_deviation_of_the_one_with_the_text() -> None:
    u, c = jax.random.normal(jax.random.key(3), (2, 5, 7, 3))
    got = Predictions(c, u).mixed(6.0, GuidanceSettings(rescale=1.0))
    np.testing.assert_allclose(np.std(got, axis=(1, 2)), np.std(c, axis=(1, 2)), rtol=1e-5)


RUNS = ["wan", "flux", pytest.param("sdxl", marks=pytest.mark.slow)]


@pytest.mark.parametrize("name", RUNS)
def test_a_pipeline_reuses_on_a_mesh(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight devices; all computed is bit-equal to no setting, and reuse is printed."""
    _, options = told(tmp_path, name)
    folder = pipeline(tmp_path, name, {"wan": "unipc", "sdxl": "euler", "flux": "flow_euler"}[name])
    plain = run(folder, name, *options)
    assert np.array_equal(run(folder, name, *options, "fast.cache.schedule=XXXX"), plain)
    capsys.readouterr()
    fewer = run(folder, name, *options, "fast.cache.schedule=XX.X", "fast.guidance.stop=0.75")
    printed = capsys.readouterr().out
    assert "approximate: 5 of 8 forwards are computed" in printed
    assert "step 3: all layers reused, two predictions" in printed
    assert 0 < np.abs(fewer - plain).max() < np.abs(plain).max()
