"""Flow matching: learn the straight line from data to noise.

    x_t = (1 - t) x + t noise     v = dx_t / dt = noise - x     loss = mean |model(x_t, t) - v|^2

Source: Lipman et al. 2022, https://arxiv.org/abs/2210.02747
Source of the times: Esser et al. 2024, https://arxiv.org/abs/2403.03206
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn_examples.samplers.flow import shifted

from .settings import FlowTraining

WHOLE = (0.0, 1.0)  # all times


class Noised(NamedTuple):
    """Noisy latents with their times and velocities."""

    mixed: Float[Array, "B ..."]  # x_t
    times: Float[Array, " B"]  # t, 0 (clean) to 1 (noise)
    velocity: Float[Array, "B ..."]  # the model's target


def drawn(
    clean: Float[Array, "B ..."],
    said: FlowTraining,
    for_times: Array,
    for_noise: Array,
    within: tuple[float, float] = WHOLE,
) -> Noised:
    """Draw times and noise as the settings say, and mix latents with noise.

    Args:
        within: as for `times`.
    """
    how = (said.timestep_shift, said.timestep_sampling, said.logit_mean, said.logit_std)
    return noised(clean, times(for_times, len(clean), *how, within=within), for_noise)


def times(
    key: Array,
    count: int,
    shift: float,
    sampling: Literal["logit_normal", "uniform"] = "logit_normal",
    mean: float = 0.0,
    std: float = 1.0,
    within: tuple[float, float] = WHOLE,
) -> Float[Array, " B"]:
    """Draw times, 0 (clean) to 1 (noise).

    Args:
        shift: above 1 draws more times near the noise.
        sampling: the distribution before the shift; "logit_normal" is the sigmoid of normal
            numbers.
        mean, std: of these normal numbers.
        within: the least time, and an upper bound; the distribution is cut off there.
    """
    if within != WHOLE:
        return _times_within(key, count, shift, sampling, mean, std, within)
    if sampling == "uniform":
        return shifted(jax.random.uniform(key, (count,)), shift)
    normal = mean + std * jax.random.normal(key, (count,))
    return shifted(jax.nn.sigmoid(normal), shift)


def _times_within(
    key: Array,
    count: int,
    shift: float,
    sampling: str,
    mean: float,
    std: float,
    within: tuple[float, float],
) -> Float[Array, " B"]:
    """Draw times within bounds: the distribution is cut off, not moved."""
    # Where the ends are before the shift.
    least, most = (t / (shift - (shift - 1) * t) for t in within)
    if sampling == "uniform":
        drawn = jax.random.uniform(key, (count,), minval=least, maxval=most)
    else:
        with np.errstate(divide="ignore"):  # 0 and 1 are infinitely far away
            low, high = ((np.log(x) - np.log1p(-x) - mean) / std for x in (least, most))
        normal = jax.random.truncated_normal(key, low, high, (count,))
        drawn = jax.nn.sigmoid(mean + std * normal)
    # Rounding may move a time across an end.
    last = np.nextafter(np.float32(within[1]), np.float32(0)) if within[1] < 1 else 1.0
    return jnp.clip(shifted(drawn, shift), within[0], last)


def noised(clean: Float[Array, "B ..."], t: Float[Array, " B"], key: Array) -> Noised:
    """Draw noise, and mix latents with it."""
    noise = jax.random.normal(key, clean.shape)
    mix = t.reshape(-1, *(1,) * (clean.ndim - 1))
    return Noised((1 - mix) * clean + mix * noise, t, noise - clean)
