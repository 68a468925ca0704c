"""Self-forcing: a model learns from its own videos, block after block.

    roll out:  no gradient; of each block x (the input of its last step), t, and x0 = x - t v
    step:      v = model(all x, t | the x0 before them, constant);  x0 = x - t v has the gradient

In a rollout of which only the last step of each block is differentiated, keys and values in the
cache are constants. One pass writes those of all x0, and one forward under the mask of teacher
forcing reads them: the same numbers and the same gradient, with nothing to differentiate a cache
for.

Source: Huang et al. 2025, https://arxiv.org/abs/2506.08009
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn_examples.common.forcing import Forcing

from .forcing import mixed

Clip = Float[Array, "B F H W C"]
# The model with its conditions: call(x, t, cache=, forcing=) gives a velocity and the cache.
Call = Callable[..., tuple[Clip, ma.KVCache]]
Empty = Callable[[ma.Stream, int, int], ma.KVCache]


class Own(NamedTuple):
    """A rollout: of every frame its clean latents, and the last input that they came from."""

    clean: Clip  # x0
    mixed: Clip  # x
    times: Float[Array, "B F"]  # t of x, 0 to 1


def roll_out(
    call: Call, cache: ma.KVCache, frames: int, sigmas: Sequence[float], noise: Callable[..., Clip]
) -> Own:
    """Make a clip block by block in few steps, each from fresh noise, without a gradient.

    Args:
        cache: empty, of the stream.
        frames: of the clip, whole blocks.
        sigmas: times of the steps, 1 for noise alone; the last is the one that is learned at.
        noise: draws it for a block's first frame, the one after its last, and the number of a step.
    """
    blocks: list[Own] = []
    for start, stop in cache.layout.stream.blocks(frames):
        x = clean = noise(start, stop, 0)
        for number, sigma in enumerate(sigmas):
            t = jnp.full(x.shape[:2], sigma)
            x = mixed(clean, t, noise(start, stop, number)) if number else x
            velocity, cache = call(x, t, cache=cache)
            clean = x - sigma * velocity
        blocks.append(Own(clean, x, t))
        _, cache = call(clean, jnp.zeros_like(t), cache=cache)
        cache = cache.advance()
    parts = zip(*blocks, strict=True)
    return Own(*(jax.lax.stop_gradient(jnp.concatenate(part, axis=1)) for part in parts))


def kept(call: Call, empty: Empty, stream: ma.Stream, own: Own) -> ma.KVCache:
    """Write the keys and values of all clean blocks in one pass, without a gradient.

    Args:
        empty: makes a cache with a slot for each frame: `empty(stream, batch, frames)`, which is
            what a model's `cache` does.
        stream: the blocks, the window and the sink.
    """
    batch, count = own.times.shape
    cache = empty(replace(stream, window=None, sink=0), batch, count).prefix(count).extract()
    none = jnp.zeros_like(own.times)
    _, cache = call(own.clean, none, cache=cache, forcing=Forcing(stream))
    return jax.lax.stop_gradient(cache.advance().cached())


def predicted(call: Call, stream: ma.Stream, own: Own, cache: ma.KVCache) -> Clip:
    """Predict every clean frame anew, with a gradient; the loss is a function of it.

    Args:
        call: the model, whose parameters are differentiated.
    """
    velocity, _ = call(own.mixed, own.times, cache=cache, forcing=Forcing(stream))
    return own.mixed - own.times.reshape(*own.times.shape, 1, 1, 1) * velocity
