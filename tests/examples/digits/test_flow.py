"""Flow matching: the times, the loss and the sampler, against a model that knows the answer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.digits import text
from maxattn_examples.digits.flow import loss_of, sample
from maxattn_examples.digits.settings import SamplingSettings, TrainingSettings
from maxattn_examples.train.flow import shifted

SHAPE = (6, 2, 4, 4, 1)
WORDS = jnp.asarray(text.encode(["a seven moving left", "a two moving up"] * 3))


class Oracle(nnx.Module):
    """Know the one video that each prompt means, and the one that the empty prompt means."""

    def __init__(self) -> None:
        self.told = nnx.Param(jax.random.normal(jax.random.key(1), SHAPE[1:]))
        self.untold = nnx.Param(jax.random.normal(jax.random.key(2), SHAPE[1:]))

    def encode(self, words: jax.Array) -> None:
        """Nothing to precompute."""

    def __call__(self, video: jax.Array, t: jax.Array, words: jax.Array, kv: Any = None) -> Any:
        empty = (words == text.PAD).all(-1)[:, None, None, None, None]
        meant = jnp.where(empty, self.untold[...], self.told[...])
        return (video - meant) / t[:, None, None, None, None]


def test_shifted_times_keep_their_ends_and_order():
    t = jnp.linspace(0, 1, 11)
    np.testing.assert_allclose(shifted(t, 1.0), t, atol=1e-7)
    moved = shifted(t, 3.0)
    assert (moved[0], moved[-1]) == (0.0, 1.0)
    assert (moved[1:-1] > t[1:-1]).all() and (jnp.diff(moved) > 0).all()
    assert float(shifted(jnp.array(0.5), 3.0)) == pytest.approx(0.75)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 2.5])
def test_a_straight_path_is_walked_to_its_end(steps: int, shift: float, scale: float):
    oracle, noise = Oracle(), jax.random.normal(jax.random.key(0), SHAPE)
    how = {"num_inference_steps": steps, "guidance_scale": scale, "timestep_shift": shift}
    found = sample(oracle, WORDS, noise, SamplingSettings(**how))
    told, untold = oracle.told[...], oracle.untold[...]
    wanted = untold + scale * (told - untold)
    np.testing.assert_allclose(found, np.broadcast_to(wanted, SHAPE), atol=1e-4)


@pytest.mark.parametrize(("value", "wanted"), [(-1.0, 1.0), (0.0, 2.0), (1.0, 5.0)])
def test_the_loss_of_a_constant_is_what_theory_says(value: float, wanted: float):
    # v = noise - x with x = 1 everywhere: mean -1, variance 1; so the loss of c is 1 + (c + 1)^2.
    def constant(video: jax.Array, *_: jax.Array) -> jax.Array:
        return jnp.full_like(video, value)

    assert loss(constant, jnp.ones((64, 5, 12, 12, 1))) == pytest.approx(wanted, 0.03)


def test_a_model_that_knows_the_answer_has_no_loss():
    def knows(video: jax.Array, t: jax.Array, _: jax.Array) -> jax.Array:
        return (video + 1.0) / t[:, None, None, None, None]  # x is -1, whatever the time

    assert loss(knows, jnp.full(SHAPE, -1.0)) < 1e-6


def loss(model: Any, video: jax.Array) -> float:
    words = jnp.zeros((len(video), 4), jnp.int32)
    return float(loss_of(model, video, words, jax.random.key(0), TrainingSettings()))
