"""Streamed digits: the cache does what training taught, and runs go from training to pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.digits import flow
from maxattn_examples.digits.settings import Settings
from maxattn_examples.digits.stream_demo import Demo
from maxattn_examples.digits.training import train

from .streamed import PROMPTS, clips, model, run, words
from .streamed import streaming as described

SINK = {"frames_per_block": 2, "window": 3, "sink": 2}
# It rolls within a block, and has a sink; tests/streaming has other windows.
PART_OF_A_BLOCK = {"frames_per_block": 2, "window": 2, "sink": 1}


def times(settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Give the clean clip a little noise, and each block of the noisy one a time."""
    assert settings.stream is not None
    frames, size = settings.data.frames, settings.stream.frames_per_block
    each = jnp.repeat(jnp.linspace(0.9, 0.2, frames // size), size)
    noisy = jnp.stack([each, each[::-1]])
    return jnp.full((2, frames), 0.05), noisy


@pytest.mark.slow
def test_blocks_with_a_cache_are_one_teacher_forced_forward():
    settings = described(rollout=PART_OF_A_BLOCK)
    built, stream = model(settings), settings.stream
    assert stream is not None
    (clean, noisy), (t_clean, t) = clips(settings), times(settings)
    whole = run(built, noisy, t, Forcing(stream, clean, t_clean))
    graph, parameters = nnx.split(built)

    @jax.jit
    def step(parameters: Any, x: Any, t: Any, cache: Any) -> Any:
        return nnx.merge(graph, parameters)(x, t, words(), cache=cache)

    cache = built.cache(stream, len(PROMPTS))
    for start, stop in stream.blocks(settings.data.frames):
        own = slice(start, stop)
        velocity, cache = step(parameters, noisy[:, own], t[:, own], cache)
        np.testing.assert_allclose(velocity, whole[:, own], atol=1e-5)
        _, cache = step(parameters, clean[:, own], t_clean[:, own], cache)
        cache = cache.advance()


def test_a_block_does_not_see_the_noise_of_others_nor_what_comes_after():
    settings = described()
    built, stream = model(settings), settings.stream
    (clean, noisy), (t_clean, t) = clips(settings), times(settings)

    def of(clean: Any, noisy: Any) -> Any:
        return run(built, noisy, t, Forcing(stream, clean, t_clean))

    base = of(clean, noisy)

    def moved(clean: Any, noisy: Any) -> list[int]:
        return np.flatnonzero(np.abs(of(clean, noisy) - base).max((0, 2, 3, 4)) > 1e-6).tolist()

    assert moved(clean, noisy.at[:, 2].add(1.0)) == [2, 3]
    assert moved(clean.at[:, 7].add(1.0), noisy) == []
    # Block 1 sees block 0. Later ones see what block 1 made of it, through keys and values.
    assert moved(clean.at[:, 0].add(1.0), noisy)[:2] == [2, 3]


@pytest.mark.slow
def test_the_loss_is_that_of_the_noisy_frames_alone():
    settings = described(training={"prompt_dropout": 0.0})
    built, (clean, _) = model(settings), clips(settings)
    told = settings.training, settings.stream
    examples = jax.jit(lambda *x: flow.forced(*x, *told))(clean, words(), jax.random.key(1))
    seen = Forcing(settings.stream, examples["context"], examples["context_times"])
    velocity = run(built, examples["mixed"], examples["times"], seen)
    wanted = np.mean((np.asarray(velocity) - np.asarray(examples["velocity"])) ** 2)
    assert float(nnx.jit(flow.loss)(built, examples)) == pytest.approx(float(wanted), 1e-5)


@pytest.mark.slow
def test_sinks_are_trained_at_distances_of_whole_turns():
    stream, shape = described(rollout=SINK).stream, (64, 8, 12, 12, 1)
    numbers = np.asarray(flow.turned(jax.random.key(1), shape, 48, stream))
    np.testing.assert_array_equal(numbers[:, :2], [[0, 1]] * 64)
    further = numbers[:, 2:] - np.arange(2, 8)
    assert (further == further[:, :1]).all()
    assert set(further[:, 0].tolist()) == {0, 12, 24, 36, 48}
    # The model reads the positions.
    settings = described(rollout=SINK)
    built, (clean, noisy), (t_clean, t) = model(settings), clips(settings), times(settings)
    seen = Forcing(settings.stream, clean, t_clean)
    near = run(built, noisy, t, seen)
    same = run(built, noisy, t, seen, jnp.arange(8))
    far = run(built, noisy, t, seen, jnp.asarray(numbers[:2]))
    np.testing.assert_allclose(near, same, atol=1e-6)
    moved = np.abs(far - near).max((1, 2, 3, 4)) > 1e-3
    np.testing.assert_array_equal(moved, further[:2, 0] > 0)
    assert moved.any()


SHORT = {"steps": 3, "batch_size": 4, "warmup_steps": 1, "checkpoint_every": 2, "log_every": 1}


@pytest.mark.slow
def test_a_run_from_training_to_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    training = SHORT | {"output_dir": str(tmp_path)}
    more = {"long_blocks": 4, "switch_block": 1, "contrast_steps": 1, "blocks": 2}
    once = {"denoising_steps": [1000], "context_noise": 50.0}
    settings = described(
        training=training, rollout=more | once, sampling={"num_inference_steps": 1},
        model={"layers": 1},
    )  # fmt: skip
    trained, losses = train(settings)
    assert len(losses) == 3 and np.isfinite(losses).all()
    found = Demo(trained, settings).run()
    assert set(found) == set(json.loads((tmp_path / "figures.json").read_text())) == {
        "streamed", "no clean pass", "bidirectional, whole clips", "bidirectional, streamed",
        "long", "switched", "switched: first digit",
    }  # fmt: skip
    assert [len(d.digit) for d in found.values()] == [2, 2, 4, 2, 4, 4, 4]
    for name in ("long.gif", "switch.gif", "quality.png"):
        assert (tmp_path / name).stat().st_size > 1000, name
    assert "FAIL  digit in block 1 at least 97%" in capsys.readouterr().out
