"""Caches whose steps decide as they run, against loops that decide on the host."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.fast.cache_settings import (
    CacheSettings,
    EasyCacheSettings,
    FirstBlockSettings,
)
from maxattn_examples.fast.program import Inputs, Memory, take
from maxattn_examples.fast.settings import FastSettings, GuidanceSettings
from maxattn_examples.fast.steps import decided_lines, plan_steps
from maxattn_examples.fast.table import table
from maxattn_examples.sample.command import arguments_of, paths_of, settings_of
from maxattn_examples.sample.run import generate
from maxattn_examples.samplers import flow_euler, start
from maxattn_examples.samplers import step as take_step
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.settings import Settings

from tests.examples.conftest import ROOT
from tests.examples.sample.pipelines import EXACT, pipeline, run, sizes_of, told

from .test_runs import CALLS, layer, model

STEPS, SCALE = 12, 4.0
BOTH = (jnp.concatenate(CALLS),)
SCHEDULE = flow_euler.schedule(STEPS, 3.0)
TAKE = jax.jit(partial(take, model), static_argnums=(0, 1))


def noise() -> Any:
    return jax.random.normal(jax.random.key(0), (2, 6))


def walked(fast: FastSettings, told: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """Take the steps of a run as a program does; return the sample, and what decided steps say."""
    state, memory, computed = start(SCHEDULE, noise()), Memory(), []
    steps = plan_steps(fast, (STEPS,), True, 3)
    for i, planned in enumerate(steps):
        what = told if planned.step.guidance == "guided" else told[-1:]
        given = Inputs(
            SCHEDULE, jnp.int32(i), state, what, jnp.float32(SCALE), memory.before(planned)
        )
        state, made = TAKE(planned.step, fast.guidance or GuidanceSettings(), given)
        memory.after(made)
        computed.append(made.computed)
    return state.x, list(decided_lines(steps, computed))


def mean(x: Any) -> float:
    return float(np.abs(np.asarray(x, np.float64)).mean())


def looped(predict: Any) -> Any:
    """Take guided steps on the host; `predict` is told samples, times and a step's number."""
    state = start(SCHEDULE, noise())
    for i in range(STEPS):

        def guided(x: Any, t: Any, i: int = i) -> Any:
            u, c = predict(x, jnp.broadcast_to(t, (2,)), i)
            return u + SCALE * (c - u)

        state = take_step(SCHEDULE, i, state, guided)
    return state.x


@pytest.mark.parametrize("apart", [True, False])
def test_first_blocks_decide_by_what_they_added(apart: bool) -> None:
    """Two calls decide apart, one call of both rows decides for both."""
    how = FirstBlockSettings(threshold=0.25, first=2, last=1)
    last: dict[int, tuple[Any, Any]] = {}
    letters: dict[int, str] = {}

    def one(x: Any, t: Any, what: Any, number: int, i: int) -> Any:
        x, t = jnp.sin(x), t[:, None]
        head = layer(x, 0, t, what)
        added, may = head - x, how.first <= i < STEPS - how.last
        was, rest = last.get(number, (0.0, 0.0))
        reuse = may and mean(added - was) / mean(was) < how.threshold
        letters[number] = letters.get(number, "") + ".X"[not reuse]
        if reuse:
            return (head + rest) * jnp.cos(t)
        y = layer(layer(head, 1, t, what), 2, t, what)
        last[number] = added, y - head
        return y * jnp.cos(t)

    def predict(x: Any, t: Any, i: int) -> Any:
        if apart:
            return tuple(one(x, t, what, n, i) for n, what in enumerate(CALLS))
        return jnp.split(one(jnp.concatenate([x, x]), jnp.tile(t, 2), BOTH[0], 0, i), 2)

    want = looped(predict)
    fast = FastSettings(cache=CacheSettings(first_block=how))
    got, said = walked(fast, CALLS if apart else BOTH)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert all("." in x and "X" in x[2:-1] for x in letters.values()), letters
    names = (" without the text", " with the text") if apart else ("",)
    assert sorted(said) == sorted(
        f"computed {x.count('X')} of 12 steps{name}: {x}"
        for name, x in zip(names, letters.values(), strict=True)
    )
    if apart:
        assert letters[0] != letters[1]


@pytest.mark.parametrize("told", [CALLS, BOTH], ids=["apart", "both"])
def test_easycache_decides_by_the_sample(told: Any) -> None:
    how, letters = EasyCacheSettings(threshold=2.0, first=3, last=1), ""
    kept: dict[str, Any] = {"error": 0.0}

    def predict(x: Any, t: Any, i: int) -> Any:
        nonlocal letters
        kept["error"] += kept.get("rate", 0) * (mean(x - kept["x"]) / mean(kept["c"]) if i else 0.0)
        reuse = how.first <= i < STEPS - how.last and kept["error"] < how.threshold
        kept["x"], letters = x, letters + ".X"[not reuse]
        if reuse:
            return tuple(x + d for d in kept["added"])
        u, c = (model(x, t, what) for what in CALLS)
        if i:
            kept["rate"] = mean(c - kept["c"]) / mean(x - kept["at"])
        kept.update(added=(u - x, c - x), c=c, at=x, error=0.0)
        return u, c

    want = looped(predict)
    got, said = walked(FastSettings(cache=CacheSettings(easycache=how)), told)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert "." in letters and "X" in letters[3:-1], letters
    assert said == [f"computed {letters.count('X')} of 12 steps: {letters}"]


@pytest.mark.parametrize("kind", ["first_block", "easycache"])
@pytest.mark.parametrize("told", [CALLS, BOTH], ids=["apart", "both"])
def test_a_threshold_of_zero_changes_no_bit(kind: str, told: Any) -> None:
    plain, _ = walked(FastSettings(), told)
    got, said = walked(FastSettings(cache=CacheSettings(**{kind: {"threshold": 0.0}})), told)
    assert np.array_equal(got, plain) and not said


@pytest.mark.parametrize("kind", ["first_block", "easycache"])
def test_decisions_go_on_when_guidance_ends(kind: str) -> None:
    guidance = GuidanceSettings(start=0.25, stop=0.5)
    threshold = {"first_block": 0.3, "easycache": 2.0}[kind]
    cache = CacheSettings(**{kind: {"threshold": threshold, "first": 2}})
    _, said = walked(FastSettings(cache=cache, guidance=guidance), CALLS)
    # The step that is guided first computes: nothing was kept of the prediction without the text.
    letters = said[0].rsplit(" ", 1)[1]
    assert len(letters) == STEPS and letters[3] == "X" and "." in letters[6:]
    if kind == "first_block":
        assert " of 12 steps with the text: " in said[0]
        assert re.search(r" of 3 steps without the text: ---X[X.]{2}------$", said[1])


def test_what_may_be_computed_is_said() -> None:
    cache = CacheSettings(easycache=EasyCacheSettings(first=2))
    found = plan_steps(FastSettings(cache=cache), (5, 4), True, 3)
    assert "".join(x.letter for x in found) == "XX??XXX?X"
    *_, last = table(found, 3, True, {})
    assert last == "approximate: at most 18 of 18 forwards are computed, at most 100%"
    zeros = FastSettings(cache=cache, guidance=GuidanceSettings(zero_steps=3))
    made = [{}] * 3 + [{"both": True}] * 6
    said = [*decided_lines(plan_steps(zeros, (9,), True, 3), made)]
    assert said == ["computed 6 of 6 steps: ---XXXXXX"]


CACHES = {
    "first_block": ("fast.cache.first_block.threshold=1.0",),
    "easycache": ("fast.cache.easycache.threshold=3.0", "fast.cache.easycache.first=2"),
}


def computed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [x for x in capsys.readouterr().out.splitlines() if x.startswith("computed")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("batched", ["true", "false"])
def test_a_mesh_decides_as_one_device(
    kind: str, batched: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs of devices share tokens by a ring in the branch that runs; padding does not decide."""
    options = told(tmp_path, "wan")[1][:2]
    folder = pipeline(tmp_path, "wan", "unipc")
    words = (*options, "num_inference_steps=8", f"guidance_batched={batched}", *CACHES[kind])
    spread = ("attention=ring", "ici_context_parallelism=2", "ici_data_parallelism=4")
    many = run(folder, "wan", *words, *spread)
    said = computed(capsys)
    file = tmp_path / "one.safetensors"
    given = ("--model", folder, *EXACT, *sizes_of("wan"), *words, "--latents", file)
    config = ROOT / "configs" / "wan_1_3b.yml"
    usual = ("model.sizes=null", "sampling.timestep_shift=null")
    found = arguments_of("", list(map(str, (config, *usual, *given))))
    settings, paths = settings_of(found, Settings), paths_of(found, str(folder))
    one = generate(WanSamplingTask.of(settings, folder), paths, jax.make_mesh((1,), ("data",)))
    assert computed(capsys) == said and all("." in x for x in said)
    assert len(said) == 1 + (kind == "first_block" and batched == "false")
    np.testing.assert_allclose(many, one, atol=1e-4 * np.abs(one).max())
