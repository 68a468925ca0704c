"""Flow matching: learn the straight line from data to noise.

    x_t = (1 - t) x + t noise     v = dx_t / dt = noise - x     loss = mean |model(x_t, t) - v|^2

Source: Lipman et al. 2022, https://arxiv.org/abs/2210.02747
Source of the times: Esser et al. 2024, https://arxiv.org/abs/2403.03206
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Float
from samplers.flow_euler import shifted


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


def times(
    key: Array,
    count: int,
    shift: float,
    sampling: Literal["logit_normal", "uniform"] = "logit_normal",
    mean: float = 0.0,
    std: float = 1.0,
) -> Float[Array, " B"]:
    """Draw times, 0 (clean) to 1 (noise).

    Args:
        key: of what is drawn.
        count: B.
        shift: moves them; above 1, more of the noisy ones.
        sampling: all as likely, or the sigmoid of normal numbers,
        mean, std: of those.
    """
    if sampling == "uniform":
        return shifted(jax.random.uniform(key, (count,)), shift)
    normal = mean + std * jax.random.normal(key, (count,))
    return shifted(jax.nn.sigmoid(normal), shift)


def noised(clean: Float[Array, "B ..."], t: Float[Array, " B"], key: Array) -> Noised:
    """Draw noise, and mix.

    Args:
        clean: latents, float32.
        t: from `times`.
        key: of what is drawn.
    """
    noise = jax.random.normal(key, clean.shape)
    mix = t.reshape(-1, *(1,) * (clean.ndim - 1))
    return Noised((1 - mix) * clean + mix * noise, t, noise - clean)
