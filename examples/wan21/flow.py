"""Flow matching: learn the straight line from data to noise.

    x_t = (1 - t) x + t noise        v = dx_t / dt = noise - x        loss = mean |model(x_t, t) - v|^2

Source: Lipman et al. 2022, https://arxiv.org/abs/2210.02747; the choice of times, Esser et al. 2024,
https://arxiv.org/abs/2403.03206
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from .settings import TrainingSettings


class Noised(NamedTuple):
    """Hold what flow matching makes of clean latents.

    Args:
        mixed: x_t.
        times: t, 0 (clean) to 1 (noise).
        velocity: what the model should say.
    """

    mixed: Float[Array, "B ..."]
    times: Float[Array, " B"]
    velocity: Float[Array, "B ..."]


def shifted(t: Float[Array, "..."], shift: float) -> Float[Array, "..."]:
    """Move times towards the noise: shift t / (1 + (shift - 1) t); 1 leaves them where they are."""
    return shift * t / (1.0 + (shift - 1.0) * t)


def times(key: Array, count: int, training: TrainingSettings) -> Float[Array, " B"]:
    """Draw times, 0 (clean) to 1 (noise), and shift them.

    Args:
        key: of what is drawn.
        count: B.
        training: `timestep_sampling`, `logit_mean`, `logit_std` and `timestep_shift`.
    """
    if training.timestep_sampling == "uniform":
        return shifted(jax.random.uniform(key, (count,)), training.timestep_shift)
    t = jax.nn.sigmoid(training.logit_mean + training.logit_std * jax.random.normal(key, (count,)))
    return shifted(t, training.timestep_shift)


def noised(clean: Float[Array, "B ..."], key: Array, training: TrainingSettings) -> Noised:
    """Draw times and noise, and mix.

    Args:
        clean: latents, float32.
        key: of what is drawn.
        training: how times are drawn.
    """
    for_times, for_noise = jax.random.split(key)
    t = times(for_times, clean.shape[0], training)
    noise = jax.random.normal(for_noise, clean.shape)
    mix = t.reshape(-1, *(1,) * (clean.ndim - 1))
    return Noised((1 - mix) * clean + mix * noise, t, noise - clean)
