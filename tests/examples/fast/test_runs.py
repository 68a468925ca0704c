"""Runs with fewer forwards are the sums that they stand for, on one device and on eight."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.scan import Layers
from maxattn_examples.compare.family import task_of_family
from maxattn_examples.fast.guidance import Predictions
from maxattn_examples.fast.settings import (
    CacheSettings,
    FastSettings,
    GuidanceSettings,
    SkipSettings,
)
from maxattn_examples.sample.command import arguments_of
from maxattn_examples.sample.loop import Walk
from maxattn_examples.sample.paths import Paths
from maxattn_examples.sample.run import load
from maxattn_examples.samplers import sample, start, unipc
from maxattn_examples.samplers import step as take_step

from maxattn.config import ConfigErrors
from tests.examples.conftest import ROOT
from tests.examples.fast.walks import Run
from tests.examples.sample.pipelines import (
    CONFIGS,
    EXACT,
    MORE,
    check,
    draw,
    pipeline,
    prepared,
    run,
    sizes_of,
    told,
)

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
    *_, last = Run(model, 3, told).samples(fast, schedule, noise, scale)
    return last


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
    never = FastSettings(guidance=GuidanceSettings(stop=1.0, after="gate"))
    assert np.array_equal(walked(never, CALLS, 4.0), walked(FastSettings(), CALLS, 4.0))


@pytest.mark.parametrize("zero_star", [False, True])
def test_a_gate_adds_the_last_difference(zero_star: bool) -> None:
    """Against a loop that keeps the difference by itself."""
    schedule, noise = unipc.schedule(STEPS, SHIFT), jax.random.normal(jax.random.key(0), (2, 6))
    state, difference = start(schedule, noise), jnp.zeros_like(noise)
    for i in range(STEPS):

        def guided(x: Any, t: Any, i: int = i) -> Any:
            nonlocal difference
            u, c = (model(x, jnp.broadcast_to(t, 2), what) for what in CALLS)
            if i < 2:
                if zero_star:
                    u *= jnp.sum(u * c, 1, keepdims=True) / jnp.sum(u * u, 1, keepdims=True)
                difference = c - u
            return c + 3.0 * difference

        state = take_step(schedule, i, state, guided)
    how = GuidanceSettings(stop=0.5, after="gate", zero_star=zero_star)
    np.testing.assert_allclose(walked(FastSettings(guidance=how), CALLS, 4.0), state.x, atol=1e-5)


@pytest.mark.parametrize("prediction", ["third", "negative"])
def test_a_skipped_layer_is_reused_where_it_was_kept(prediction: Any) -> None:
    """Layers 0 and 1 are reused, and 1 is skipped in one prediction, in a loop of its own."""
    schedule, noise = unipc.schedule(STEPS, SHIFT), jax.random.normal(jax.random.key(0), (2, 6))
    state, kept = start(schedule, noise), {}
    skipping = "third" if prediction == "third" else "u"

    def one(x: Any, t: Any, name: str, i: int) -> Any:
        tt, what = jnp.broadcast_to(t, (2, 1)), CALLS[0 if name == "u" else 1]
        x = jnp.sin(x)
        skips = name == skipping and i > 0
        if i in (0, 1, 3):  # 1: nothing was kept of a prediction that skips
            y = layer(x, 0, tt, what)
            kept[name] = (y if skips else layer(y, 1, tt, what)) - x
        return layer(x + kept[name], 2, tt, what) * jnp.cos(tt)

    for i in range(STEPS):

        def guided(x: Any, t: Any, i: int = i) -> Any:
            u, c = (one(x, t, name, i) for name in "uc")
            third = 1.5 * (c - one(x, t, "third", i)) if prediction == "third" and i else 0
            return u + 4.0 * (c - u) + third

        state = take_step(schedule, i, state, guided)
    scale = 1.5 if prediction == "third" else None
    skip = SkipSettings(layers=(1,), prediction=prediction, scale=scale, start=0.0, stop=1.0)
    cache = CacheSettings(schedule="X..X", layers=(0, 2))
    fast = FastSettings(cache=cache, guidance=GuidanceSettings(skip=skip))
    np.testing.assert_allclose(walked(fast, CALLS, 4.0), state.x, rtol=1e-4, atol=1e-5)


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
    folder, options = prepared(tmp_path, name)
    plain = run(folder, name, *options)
    assert np.array_equal(run(folder, name, *options, "fast.cache.schedule=XXXX"), plain)
    capsys.readouterr()
    fewer = run(folder, name, *options, "fast.cache.schedule=XX.X", "fast.guidance.stop=0.75")
    printed = capsys.readouterr().out
    assert "approximate: 5 of 8 forwards are computed, 62%; " in printed
    assert re.search(r" kept between steps on each device\n", printed)
    assert re.search(r" 3 +reused +two +dot_product +0\n", printed)
    assert "not in one call: steps of sampling.fast differ between the predictions" in printed
    assert 0 < np.abs(fewer - plain).max() < np.abs(plain).max()


@pytest.mark.parametrize("order", [0, 1])
def test_no_more_is_kept_than_is_printed(
    order: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, options = told(tmp_path, "wan")
    live: list[int] = []

    def residuals() -> dict[int, int]:
        arrays = (x for x in jax.live_arrays() if x.shape[1:] == (18, 24))
        return {id(x): x.nbytes // jax.device_count() for x in arrays}

    def taken(walk: Walk, *args: Any) -> None:
        others = residuals()

        def observed(_: int, state: Any) -> Any:
            live.append(sum(size for x, size in residuals().items() if x not in others))
            return state

        walk.observe = observed
        take(walk, *args)

    take = Walk.take
    monkeypatch.setattr(Walk, "take", taken)
    cache = f"fast.cache={{schedule: XX..X..X.X, order: {order}}}"
    run(pipeline(tmp_path, "wan", "unipc"), "wan", *options, "--steps", "10", cache)
    assert f"; {max(live) / 2**10:.2f} KiB kept between steps" in capsys.readouterr().out


def test_each_prediction_has_devices_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = prepared(tmp_path)
    one = ("ici_fsdp_parallelism=1", "ici_context_parallelism=8", "guidance_batched=false")
    apart = run(folder, "wan", *options, *one)
    capsys.readouterr()
    two = ("ici_data_parallelism=2", "ici_fsdp_parallelism=1", "ici_context_parallelism=4")
    spread = run(folder, "wan", *options, *two)
    printed = capsys.readouterr().out
    assert "one call of the model for both, each on half of the 2 devices of data" in printed
    assert "1 samples in 2 rows of the model" in printed
    check(spread, apart)


def test_some_steps_have_another_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights under tpu_flash, which rounds otherwise; the rest has dot_product."""
    folder, options = prepared(tmp_path)
    plain, named = (
        run(folder, "wan", *options, *more)
        for more in ((), ("fast.kernels=[{steps: [0, 2], attention: dot_product}]",))
    )
    assert np.array_equal(named, plain)
    capsys.readouterr()
    other = run(folder, "wan", *options, "fast.kernels=[{steps: [1, 3], attention: tpu_flash}]")
    printed = capsys.readouterr().out
    assert "2 to 3   computed   two           tpu_flash     4" in printed
    assert not np.array_equal(other, plain)
    check(other, plain)
    with pytest.raises(ConfigErrors, match=r"sampling.fast.kernels: attention cudnn\n"):
        run(folder, "wan", *options, "fast.kernels=[{steps: [1, 3], attention: cudnn}]")


@pytest.mark.parametrize("name", RUNS)
def test_a_plan_is_what_a_run_begins_with(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights, embeddings or torch."""
    folder = pipeline(tmp_path, name, {"wan": "unipc", "sdxl": "euler", "flux": "flow_euler"}[name])
    for file in folder.rglob("*.safetensors"):
        file.unlink()
    schedule = ("fast.cache.schedule=XX.X", "fast.guidance.stop=0.75")
    draw(name, "--model", folder, "--plan", *EXACT, *MORE.get(name, ()), *sizes_of(name), *schedule)
    printed = capsys.readouterr().out
    assert "approximate: 5 of 8 forwards are computed, 62%; " in printed
    assert not list(folder.rglob("*.safetensors"))


def task_of(name: Family, folder: Path) -> Any:
    """Return the sampling task of a fixture's pipeline, as `run` has it."""
    make, read = task_of_family(name)
    null = () if name == "sdxl" else ("model.sizes=null", "sampling.timestep_shift=null")
    settings = (*null, *EXACT, *MORE.get(name, ()), *sizes_of(name))
    config = str(ROOT / "configs" / CONFIGS[name])
    found = arguments_of("", [config, "--model", str(folder), *settings])
    return make(read(found, ()), folder)


GATED = ["wan", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flux", "sdxl"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", GATED)
def test_a_gated_pipeline_adds_the_last_difference(name: Family, tmp_path: Path) -> None:
    """Against a loop of its own over the model: two steps are guided, two reuse c - u."""
    arrays, options = told(tmp_path, name)
    which = {"wan": "unipc", "sdxl": "euler", "flux": "flow_euler"}[name]
    folder = pipeline(tmp_path, name, which)
    plain = run(folder, name, *options)
    gate = "fast.guidance={stop: 1.0, after: gate}"
    assert np.array_equal(run(folder, name, *options, gate), plain)
    gated = run(folder, name, *options, gate.replace("1.0", "0.5"))

    task = task_of(name, folder)
    model = load(task, Paths(folder), None)
    given = task.completed({k: x for k, x in arrays.items() if not k.startswith("out.")})
    noise = jnp.moveaxis(given.pop("noise"), 1, -1)
    negative = {k.removeprefix("negative_"): x for k, x in given.items() if "negative_" in k}
    meant = {k: x for k, x in given.items() if "negative_" not in k}
    texts = [task.told(model, x) for x in (meant | negative, meant)]
    schedule, scale = task.sampler().schedule(STEPS), task.settings.sampling.cfg_scale
    state, difference = start(schedule, noise), jnp.zeros_like(noise)
    for i in range(STEPS):

        def guided(x: Any, t: Any, i: int = i) -> Any:
            nonlocal difference
            t = jnp.broadcast_to(t, x.shape[:1])
            u, c = (task.predict(model, x, t, text).astype(jnp.float32) for text in texts)
            difference = c - u if i < 2 else difference
            return c + (scale - 1) * difference

        state = take_step(schedule, i, state, guided)
    check(gated, np.moveaxis(np.asarray(state.x), -1, 1))
    assert np.abs(gated - plain).max() > 1e-3 * np.abs(plain).max()


@pytest.mark.parametrize(
    "cache", ["first_block.threshold=0.3", "easycache={threshold: 0.5, first: 2}"]
)
def test_layers_that_are_not_scanned_decide_as_scanned_ones(cache: str, tmp_path: Path) -> None:
    """As on a GPU: each layer's parameters are read inside a branch of the program."""
    folder, options = prepared(tmp_path)
    words = (*options, "num_inference_steps=9", f"fast.cache.{cache}")
    scanned, apart = (
        run(folder, "wan", *words, f"model.scan_layers={scan}") for scan in ("true", "false")
    )
    np.testing.assert_allclose(apart, scanned, atol=1e-4 * np.abs(scanned).max())
