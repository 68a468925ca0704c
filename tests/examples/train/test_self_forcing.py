"""Self-forcing: one forward on the model's rollout has the gradient of the rollout's last steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.train import forcing

import maxattn as ma
from tests.examples.wan.streamed import SIDES, TOKENS, plain, text
from tests.waiting import but

SIGMAS = (1.0, 0.8, 0.5)
TARGET = jnp.asarray(np.random.default_rng(5).normal(size=(2, 6, *SIDES, 4)), jnp.float32)


def noise(start: int, stop: int, number: int) -> jax.Array:
    """Draw the noise of a block's step."""
    key = jax.random.fold_in(jax.random.key(start), number)
    return jax.random.normal(key, (2, stop - start, *SIDES, 4))


def setup(**rollout: Any) -> Any:
    """Return the model's parts, its stream, and a function that calls it with parameters."""
    built, stream = plain(), ma.Stream(TOKENS, 2, rollout["window"], rollout["sink"])
    graph, parameters = nnx.split(built)

    def call(parameters: Any, x: Any, t: Any, **seen: Any) -> Any:
        return nnx.merge(graph, parameters)(x, 1000.0 * t, text(2), **seen)

    return built, stream, parameters, jax.jit(call)


def of_the_forward(built: Any, stream: ma.Stream, parameters: Any, call: Any, own: Any) -> Any:
    """Return loss and gradient of the one forward."""
    kept = forcing.kept(partial(call, parameters), built.cache, stream, own)

    def loss(parameters: Any) -> Any:
        made = forcing.predicted(partial(call, parameters), stream, own, kept)
        return ((made - TARGET) ** 2).mean(), made

    return jax.value_and_grad(loss, has_aux=True)(parameters)


def close(found: Any, wanted: Any, atol: float = 1e-6) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


@pytest.mark.slow
def test_the_gradient_is_the_truncated_one_of_the_cached_passes():
    # Without a window each block can read what is kept with `cached`, which has a gradient.
    built, stream, parameters, call = setup(window=None, sink=0)
    fixed = partial(call, parameters)
    own = forcing.roll_out(fixed, built.cache(stream, 2, 6), 6, SIGMAS, noise)
    (_, made), gradient = of_the_forward(built, stream, parameters, call, own)

    def blockwise(parameters: Any) -> Any:
        cache, total = built.cache(stream, 2, 6), 0.0
        for start, stop in stream.blocks(6):
            at = slice(start, stop)
            x, t = own.mixed[:, at], own.times[:, at]
            if start:
                reads = jax.lax.stop_gradient(cache.cached())
                v, _ = call(parameters, x, t, cache=reads)
            else:
                v = call(parameters, x, t)
            x0 = x - SIGMAS[-1] * v
            total = total + ((x0 - TARGET[:, at]) ** 2).sum()
            _, cache = fixed(own.clean[:, at], 0 * t, cache=cache)
            cache = cache.advance()
        return total / TARGET.size

    close(gradient, jax.grad(blockwise)(parameters))
    np.testing.assert_allclose(made, own.clean, atol=1e-5)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3


ROLLOUTS = [{"window": 2, "sink": 0}, {"window": 3, "sink": 2}]


# The gradient's test has no sink.
@pytest.mark.slow
@pytest.mark.parametrize("rollout", but(ROLLOUTS, ROLLOUTS[1:]), ids=["window", "sink"])
def test_the_forward_makes_what_the_rollout_made(rollout: dict[str, int]):
    built, stream, parameters, call = setup(**rollout)
    fixed = partial(call, parameters)
    own = forcing.roll_out(fixed, built.cache(stream, 2), 8, SIGMAS, noise)
    assert own.clean.shape == own.mixed.shape == (2, 8, *SIDES, 4)
    assert (own.times == SIGMAS[-1]).all()
    kept = forcing.kept(fixed, built.cache, stream, own)
    made = forcing.predicted(fixed, stream, own, kept)
    np.testing.assert_allclose(made, own.clean, atol=1e-5)
