"""Training by forcing: each block of a clip has its own time, and attends to earlier blocks.

    none        one time for a clip, and every frame attends to all others
    diffusion   a time for each block; a block attends to earlier blocks with their own noise
    teacher     a time for each block; a block attends to earlier blocks clean, or with little noise

Window and sink are those of one `ma.Stream`, which also makes the cache for sampling.

Sources: Chen et al. 2024, https://arxiv.org/abs/2407.01392 (diffusion forcing); Gao et al. 2024,
https://arxiv.org/abs/2406.10981 (clean blocks beside noisy ones)
"""

from __future__ import annotations

from collections.abc import Mapping
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
