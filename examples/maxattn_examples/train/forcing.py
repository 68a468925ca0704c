"""Training by forcing: each block of a clip has its own time, and attends to earlier blocks.

    none        one time for a clip, and every frame attends to all others
    diffusion   a time for each block; a block attends to earlier blocks with their own noise
    teacher     a time for each block; a block attends to earlier blocks clean, or with little noise

Window and sink are those of one `ma.Stream`, which also makes the cache for sampling.

Sources: Chen et al. 2024, https://arxiv.org/abs/2407.01392 (diffusion forcing); Gao et al. 2024,
https://arxiv.org/abs/2406.10981 (clean blocks beside noisy ones)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import maxattn as ma
from maxattn_examples.common.forcing import Forcing

from . import flow
from .settings import How
from .task import Arrays


class Noise(NamedTuple):
    """The distribution of times and noise for a batch of clips.

    Args:
        stream: gives the frames of each block.
        shift: of times, as in `flow.times`.
        context: the largest time of clean clips, 0 to 1; None for diffusion forcing, without clean
            clips.
        dropped: share of the clips whose clean clip is pure noise, so that each of their blocks is
            trained like a first one.
        more: further arguments of `flow.times`.
    """

    stream: ma.Stream
    shift: float
    context: float | None = 0.0
    dropped: float = 0.0
    more: Mapping[str, Any] = {}


def block_times(key: Array, count: int, frames: int, noise: Noise) -> Float[Array, "B F"]:
    """Draw an independent time for each block, which all of its frames share.

    Raises:
        InputError: the last block is not whole.
    """
    lengths = [stop - start for start, stop in noise.stream.blocks(frames)]
    t = flow.times(key, count * len(lengths), noise.shift, **noise.more)
    each = t.reshape(count, len(lengths))
    return jnp.repeat(each, jnp.asarray(lengths), axis=1, total_repeat_length=frames)


def mixed(clean: Array, t: Float[Array, "B F"], noise: Array) -> Array:
    """Mix each frame with noise: (1 - t) clean + t noise."""
    share = t.reshape(*t.shape, *(1,) * (clean.ndim - 2))
    return (1 - share) * clean + share * noise


def noised(
    clean: Float[Array, "B F ..."], key: Array, noise: Noise, past: Array | None = None
) -> Arrays:
    """Draw times and noise, for the noisy clips and for the clean ones beside them.

    A clean clip has one time, uniform up to `noise.context`, and noise of its own, which reveals
    nothing about the noise that the model must predict.

    Args:
        past: the clean clips, if they differ from `clean`.

    Returns:
        mixed, times [B, F] and velocity of the noisy clips; with a context also context and
        context_times [B, F].
    """
    count, frames = clean.shape[:2]
    for_times, for_noise, for_context, for_most, for_drops = jax.random.split(key, 5)
    t = block_times(for_times, count, frames, noise)
    drawn = jax.random.normal(for_noise, clean.shape)
    found = {"mixed": mixed(clean, t, drawn), "times": t, "velocity": drawn - clean}
    if noise.context is None:
        return found
    one = jax.random.uniform(for_most, (count, 1), maxval=noise.context)
    one = jnp.where(jax.random.bernoulli(for_drops, noise.dropped, (count, 1)), 1.0, one)
    at = jnp.broadcast_to(one, t.shape)
    own = jax.random.normal(for_context, clean.shape)
    past = clean if past is None else past
    return found | {"context": mixed(past, at, own), "context_times": at}


def seen(examples: Arrays, stream: ma.Stream, scale: float = 1.0) -> Forcing:
    """Return the `forcing=` argument of a model for noised clips.

    Args:
        examples: from `noised`.
        scale: the model's time of pure noise.
    """
    if "context" not in examples:
        return Forcing(stream)
    return Forcing(stream, examples["context"], scale * examples["context_times"])


def mask(how: How, stream: ma.Stream, frames: int) -> Any:
    """Return the mask of self-attention in a training step; None for full attention."""
    if how == "none":
        return None
    return stream.teacher_mask(frames) if how == "teacher" else stream.mask(frames)


# ---- self-forcing --------------------------------------------------------------------------------
# A model is trained on its own videos, block by block.
#
#     roll out:  no gradient; of each block x (the input of its last step), t, and x0 = x - t v
#     step:      v = model(all x, t | the x0 before them, constant);  x0 = x - t v has the gradient
#
# If only the last step of each block is differentiated, keys and values in the cache are constants.
# One pass writes those of all x0, and one forward under the mask of teacher forcing reads them. The
# result and its gradient equal those of the rollout, but no cache is differentiated.
#
# Source: Huang et al. 2025, https://arxiv.org/abs/2506.08009

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
