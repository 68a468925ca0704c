"""Samplers that re-noise: a sample's noise does not depend on the mesh or the batch."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from maxattn_examples.sample.scheduler import read
from maxattn_examples.samplers import (
    Schedule,
    flow_euler,
    flow_lcm,
    keys_of,
    lcm,
    sample,
    start,
    step,
)
from maxattn_examples.samplers.sampler import CLASSES
from maxattn_examples.samplers.schedule import drawn

from maxattn.errors import InputError
from tests.fixtures import make_samplers as made
from tests.golden_text import check_refused

from .test_samplers import SDXL, folder_of

SHAPE = (8, 4, 6, 2)
SCHEDULES = {"lcm": lcm(4), "flow_lcm": flow_lcm(4, 5.0)}


def model(x: jax.Array, t: jax.Array) -> jax.Array:
    return made.model(x, t, jnp)


def walked(schedule: Schedule, seed: int = 0, rows: int = 8) -> jax.Array:
    noise = jax.random.normal(jax.random.key(1), SHAPE)[:rows]
    return sample(model, noise, schedule, keys_of(seed, rows))


def test_noise_is_of_seed_place_and_step() -> None:
    one = drawn(keys_of(3, 8), 2, SHAPE[1:])
    np.testing.assert_array_equal(drawn(keys_of(3, 3), 2, SHAPE[1:]), one[:3])
    others = [one, drawn(keys_of(3, 8), 1, SHAPE[1:]), drawn(keys_of(4, 8), 2, SHAPE[1:])]
    rows = [row.tobytes() for batch in others for row in np.asarray(batch)]
    assert len({*rows}) == 24, "no two places, steps or seeds have the same"
    many = np.asarray(drawn(keys_of(0, 2), 0, (50_000,)), np.float64)
    assert abs(many.mean()) < 0.01 and abs(many.std() - 1) < 0.01


@pytest.mark.parametrize("name", SCHEDULES)
def test_meshes_and_batches_agree(name: str) -> None:
    schedule, whole = SCHEDULES[name], walked(SCHEDULES[name])
    np.testing.assert_allclose(walked(schedule, rows=3), whole[:3], rtol=1e-5, atol=1e-6)
    noise, keys = jax.random.normal(jax.random.key(1), SHAPE), keys_of(0, 8)
    for spec in (P("data", "context"), P(None, None, "context")):
        mesh = jax.make_mesh((4, 2), ("data", "context"), (jax.sharding.AxisType.Auto,) * 2)
        placed = jax.device_put(noise, NamedSharding(mesh, spec))
        rows = jax.device_put(keys, NamedSharding(mesh, P(spec[0])))
        found = jax.jit(lambda x, k: sample(model, x, schedule, k))(placed, rows)
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_one_by_one_are_the_scan(name: str) -> None:
    schedule, noise = SCHEDULES[name], jax.random.normal(jax.random.key(1), SHAPE)
    state = jax.jit(start)(schedule, noise, keys_of(0, 8))
    once = jax.jit(lambda i, state: step(schedule, i, state, model))
    for i in range(4):
        state = once(i, state)
    np.testing.assert_allclose(state.x, walked(schedule), rtol=1e-5, atol=1e-6)
    assert np.abs(state.x - walked(schedule, seed=1)).max() > 0.1


def test_the_last_step_and_deterministic_samplers_draw_none() -> None:
    one = lcm(1)
    np.testing.assert_array_equal(walked(one), walked(one, seed=1))
    euler = flow_euler(4)
    assert start(euler, jnp.ones(SHAPE), keys_of(0, 8)).keys is None
    np.testing.assert_array_equal(walked(euler), walked(euler, seed=1))


def test_without_keys_it_is_refused() -> None:
    given = model, jnp.ones(SHAPE), SCHEDULES["lcm"]
    check_refused("samplers/without_keys", InputError, sample, *given)


def test_files_of_schedulers_that_re_noise_are_read(tmp_path: Path) -> None:
    file = {"_class_name": CLASSES["flow_lcm"], "shift": 8.0, "upscale_mode": "bicubic"}
    found = read(folder_of(tmp_path, **file, scale_factors=None), "flow")
    assert str(found).startswith("flow_lcm, re-noising, shift 8.0 (scheduler/")
    kept = {**SDXL, "_class_name": CLASSES["lcm"], "original_inference_steps": 25}
    assert read(folder_of(tmp_path, **kept), "discrete").schedule(5).times[1] == 799
    # As LCMScheduler.from_config(pipe.scheduler.config): another class's file, LCM's own options.
    other = read(folder_of(tmp_path, **SDXL), "discrete", "lcm")
    np.testing.assert_array_equal(other.schedule(4).times, [999, 759, 499, 259])
