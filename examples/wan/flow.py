"""Flow matching: learn the straight line from data to noise, then walk it backwards.

    x_t = (1 - t) x + t noise        v = dx_t / dt = noise - x        loss = mean |model(x_t, t) - v|^2

Source: Lipman et al. 2022, https://arxiv.org/abs/2210.02747; the choice of times, Esser et al. 2024,
https://arxiv.org/abs/2403.03206
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from train import flow
from train.flow import shifted
from train.task import Arrays

from .model import Video, WanTransformer, Words
from .settings import SamplingSettings, TrainingSettings
from .text import PAD, drop


def noised(video: Video, words: Words, key: Array, training: TrainingSettings) -> Arrays:
    """Draw times and noise; replace some prompts by the empty one.

    Args:
        video: clean videos, -1..1.
        words: token ids of their prompts.
        key: of times, noise and dropped prompts.
        training: `timestep_shift` and `prompt_dropout`.
    """
    times, noises, drops = jax.random.split(key, 3)
    drawn = flow.noised(video, flow.times(times, len(video), training.timestep_shift), noises)
    return drawn._asdict() | {"words": drop(words, training.prompt_dropout, drops)}


def loss(model: WanTransformer, examples: Arrays) -> Float[Array, ""]:
    """Measure how far the predicted velocity is from the true one.

    Args:
        model: what predicts.
        examples: from `noised`.
    """
    velocity = model(examples["mixed"], examples["times"], examples["words"])
    return jnp.mean((velocity - examples["velocity"]) ** 2)


def loss_of(
    model: WanTransformer, video: Video, words: Words, key: Array, training: TrainingSettings
) -> Float[Array, ""]:
    """Draw times and noise, and measure the loss; `noised` names the arguments."""
    return loss(model, noised(video, words, key, training))


@partial(nnx.jit, static_argnames="sampling")
def sample(model: WanTransformer, words: Words, noise: Video, sampling: SamplingSettings) -> Video:
    """Walk from noise to videos in Euler steps, away from what the empty prompt would give.

    v = v(empty) + guidance_scale (v(prompt) - v(empty))

    Args:
        model: what predicts velocities.
        words: token ids of the prompts.
        noise: where to start.
        sampling: `num_inference_steps`, `guidance_scale` and `timestep_shift`.
    """
    guided = sampling.guidance_scale != 1.0
    both = jnp.concatenate([words, jnp.full_like(words, PAD)]) if guided else words
    kv = model.encode(both)

    def velocity(x: Video, t: Array) -> Video:
        twice = jnp.concatenate([x, x]) if guided else x
        v = model(twice, jnp.broadcast_to(t, twice.shape[:1]), both, kv)
        if not guided:
            return v
        told, untold = jnp.split(v, 2)
        return untold + sampling.guidance_scale * (told - untold)

    def euler(x: Video, span: tuple[Array, Array]) -> tuple[Video, None]:
        here, there = span
        return x + (there - here) * velocity(x, here), None

    times = shifted(jnp.linspace(1.0, 0.0, sampling.num_inference_steps + 1), sampling.timestep_shift)
    return jax.lax.scan(euler, noise, (times[:-1], times[1:]))[0]
