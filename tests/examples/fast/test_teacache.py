"""Schedules of TeaCache, which weights decide before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.fast.cache_settings import CacheSettings, TeaCacheSettings
from maxattn_examples.fast.schedules import letters_of
from maxattn_examples.fast.settings import FastSettings
from maxattn_examples.fast.steps import plan_steps
from maxattn_examples.fast.teacache import POLYNOMIALS, SIZES, teacache
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.sizes import Sizes
from maxattn_examples.wan.time_states import time_states
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from tests.examples.sample.pipelines import EXACT, draw, pipeline, prepared, run, sizes_of

LIMIT = 4.0


@pytest.mark.parametrize("which", ["embedding", "modulation"])
def test_teacache_is_of_the_loaded_models_times(which: Any, tmp_path: Path) -> None:
    folder, times = pipeline(tmp_path, "wan", "unipc") / "transformer", np.linspace(990, 5, 12)
    sizes = Sizes.of_folder(folder)
    model = WanTransformer3D(sizes, rngs=nnx.Rngs(0))
    weights.load_diffusers(model, folder)
    states = []
    for t in times:
        time = model.condition_embedder.time(jnp.full((1, 1), t, jnp.float32))
        states.append(np.ravel(time.embedding if which == "embedding" else time.modulation))
    got = time_states(folder, sizes, times, which)
    np.testing.assert_allclose(got, states, rtol=1e-5, atol=1e-6)
    how = TeaCacheSettings(
        polynomial=(2.0, 0.5, 0.01), input=which, threshold=LIMIT, first=2, last=1
    )
    letters, total = "XX", 0.0
    for i in range(2, 12):
        change = np.abs(states[i] - states[i - 1]).mean() / np.abs(states[i - 1]).mean()
        total += 2 * change**2 + 0.5 * change + 0.01
        letters += "." if total < LIMIT and i < 11 else "X"
        total = 0.0 if letters[-1] == "X" else total
    assert teacache(got, how) == letters and "." in letters and "X" in letters[2:-1]


def test_a_run_with_teacache_is_that_of_the_schedule_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, options = prepared(tmp_path)
    words = (*options, "num_inference_steps=8")
    tea = "fast.cache.teacache.{}={}".format
    found = run(folder, "wan", *words, tea("polynomial", "[1, 0]"), tea("threshold", 1.5))
    line = next(x for x in capsys.readouterr().out.splitlines() if "schedule X" in x)
    letters = line.split()[1]
    assert line.endswith("(teacache, threshold 1.5)") and "." in letters
    assert np.array_equal(run(folder, "wan", *words, f"fast.cache.schedule={letters}"), found)


def test_teacache_is_refused_for_another_model(tmp_path: Path) -> None:
    folder, options = prepared(tmp_path)
    words = (*EXACT, *sizes_of("wan"), *options, "num_inference_steps=8", "--model", folder)
    words = (*words, "--latents", tmp_path / "out.safetensors")
    with pytest.raises(ConfigErrors, match="has num_layers 2, in_channels 4"):
        draw("wan", *words, "fast.cache.teacache.polynomial=wan-2.1-t2v-1.3b")
    lora = {"transformer.condition_embedder.time_embedder.linear_1.lora_A.weight": np.ones((2, 8))}
    save_file({k: x.astype(np.float32) for k, x in lora.items()}, tmp_path / "lora.safetensors")
    lora_words = ("--lora", tmp_path / "lora.safetensors")
    with pytest.raises(ConfigErrors, match="the embedding of times, which this LoRA changes"):
        draw("wan", *words, *lora_words, "fast.cache.teacache.polynomial=[1, 0]")


def test_a_model_without_states_of_its_own_times_is_refused() -> None:
    """Flux.1's modulation is of the text too; SDXL's UNet has one layer."""
    cache = CacheSettings(teacache=TeaCacheSettings(polynomial=(1.0, 0.0)))
    with pytest.raises(ConfigError, match=r"set sampling.fast.cache.first_block or .*interval"):
        letters_of(cache, (20,), 57)
    with pytest.raises(ConfigError, match=r"set sampling.fast.cache.interval instead"):
        plan_steps(FastSettings(cache=cache), (20,), True, 1)


def test_published_polynomials_are_of_degree_four() -> None:
    assert {name for name, _ in POLYNOMIALS} == set(SIZES)
    assert {len(x) for x in POLYNOMIALS.values()} == {5}
