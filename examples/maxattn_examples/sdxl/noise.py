"""What SDXL learns from a picture: the noise in it, or v, at one of a thousand times.

    x_t = a x + s noise,  a = sqrt(alpha_bar_t),  s = sqrt(1 - alpha_bar_t)
    epsilon: the noise        v = a noise - s x
    weight = min(r, gamma) / (r [+ 1 for v]),  r = a^2 / s^2

Source: Ho et al., https://arxiv.org/abs/2006.11239; v, Salimans and Ho,
https://arxiv.org/abs/2202.00512; the weights, Hang et al., https://arxiv.org/abs/2303.09556
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from maxattn_examples.samplers.euler import Betas


class Noised(NamedTuple):
    """Noisy latents, and the target of the UNet.

    Args:
        mixed: x_t.
        times: t, whole numbers from 0 (clean) to 999 (noise).
        target: what the model should say.
    """

    mixed: Float[Array, "B ..."]
    times: Int[Array, " B"]
    target: Float[Array, "B ..."]


def noised(clean: Float[Array, "B ..."], key: Array, betas: Betas) -> Noised:
    """Draw times, each as likely, and noise, and mix.

    Args:
        clean: latents, float32.
        key: of what is drawn.
        betas: how much noise there is at each time, and what the model says of it.
    """
    for_times, for_noise = jax.random.split(key)
    t = jax.random.randint(for_times, clean.shape[:1], 0, betas.num_train_timesteps)
    noise = jax.random.normal(for_noise, clean.shape)
    a, s = (x.reshape(-1, *(1,) * (clean.ndim - 1)) for x in signal_and_noise(t, betas))
    target = noise if betas.prediction_type == "epsilon" else a * noise - s * clean
    return Noised(a * clean + s * noise, t, target)


def signal_and_noise(
    t: Int[Array, " B"], betas: Betas
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """Return a and s of times."""
    alpha_bar = betas.alpha_bar()
    a, s = (jnp.asarray(np.sqrt(x), jnp.float32) for x in (alpha_bar, 1.0 - alpha_bar))
    return a[t], s[t]


def weights(t: Int[Array, " B"], gamma: float | None, betas: Betas) -> Float[Array, " B"]:
    """Return how much each example counts; None for `gamma` is one for all."""
    if gamma is None:
        return jnp.ones(t.shape)
    a, s = signal_and_noise(t, betas)
    ratio = (a / s) ** 2
    if betas.prediction_type == "v_prediction":
        return jnp.minimum(ratio, gamma) / (ratio + 1.0)
    return jnp.minimum(1.0, gamma / ratio)
