"""Self-forcing: a model is trained on its own videos, block by block.

    roll out:  no gradient; of each block x (the input of its last step), t, and x0 = x - t v
    step:      v = model(all x, t | the x0 before them, constant);  x0 = x - t v has the gradient

If only the last step of each block is differentiated, keys and values in the cache are constants.
One pass writes those of all x0, and one forward under the mask of teacher forcing reads them. The
result and its gradient equal those of the rollout, but no cache is differentiated.

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
    """The clean latents of every frame (x0), and the noisy input (x, t) that predicted them."""

    clean: Clip  # x0
    mixed: Clip  # x
    times: Float[Array, "B F"]  # t of x, 0 to 1


def roll_out(
    call: Call, cache: ma.KVCache, frames: int, sigmas: Sequence[float], noise: Callable[..., Clip]
) -> Own:
    """Sample a clip block by block in few steps, each from fresh noise, without a gradient.

    Args:
        cache: empty, of the stream.
        frames: number of frames, in whole blocks.
        sigmas: times of the steps, 1 for pure noise; the model is trained at the last.
        noise: draws it from a block's first frame, the frame after its last, and the step's number.
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
        empty: makes a cache with a slot for each frame, `empty(stream, batch, frames)`, as a
            model's
            `cache` does.
        stream: the blocks, the window and the sink.
    """
    batch, count = own.times.shape
    cache = empty(replace(stream, window=None, sink=0), batch, count).prefix(count).extract()
    none = jnp.zeros_like(own.times)
    _, cache = call(own.clean, none, cache=cache, forcing=Forcing(stream))
    return jax.lax.stop_gradient(cache.advance().cached())


def predicted(call: Call, stream: ma.Stream, own: Own, cache: ma.KVCache) -> Clip:
    """Predict every clean frame again, with a gradient, for the loss.

    Args:
        call: the model, whose parameters are differentiated.
    """
    velocity, _ = call(own.mixed, own.times, cache=cache, forcing=Forcing(stream))
    return own.mixed - own.times.reshape(*own.times.shape, 1, 1, 1) * velocity
