"""Noise levels of models with a thousand discrete times, and Euler steps along sigma.

    alpha_bar_t = prod_{s <= t} (1 - beta_s)
    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) noise
    sigma = sqrt((1 - alpha_bar) / alpha_bar)
    x' = x + (sigma' - sigma) * noise,   the model's input is x / sqrt(sigma^2 + 1)

Source: Ho et al. 2020, https://arxiv.org/abs/2006.11239; for zero terminal SNR and the spacings,
Lin et al. 2023, https://arxiv.org/abs/2305.08891; for the steps, Karras et al. 2022,
https://arxiv.org/abs/2206.00364, as diffusers' EulerDiscreteScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from .schedule import Schedule, check, one_step

Curve = Literal["linear", "scaled_linear"]
Spacing = Literal["leading", "trailing", "linspace"]
Prediction = Literal["epsilon", "v_prediction"]
TINY = 2.0**-24  # replaces an alpha_bar of 0, at which sigma would be infinite


def schedule(
    steps: int,
    betas: Betas | None = None,
    *,
    times: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """Make the schedule of Euler.

    Args:
        steps: model calls.
        betas: the noise levels of the model's training; default SDXL's.
        times: descending; default evenly spaced as in `betas`.
        sigmas: descending; they replace the times.
    """
    betas = betas or Betas()
    known = known_sigmas(betas)
    if sigmas is not None:
        sigma = np.array(sigmas, np.float64)
        at = np.interp(np.log(sigma), np.log(known), np.arange(len(known)))
    else:
        at = betas.times(steps) if times is None else np.array(times, np.float64)
        sigma = np.interp(at, np.arange(len(known)), known)
    change = np.diff(np.append(sigma, 0.0))
    whole = np.sqrt(sigma**2 + 1)
    predict = np.stack([np.ones(len(at)), change], -1)
    if betas.prediction_type == "v_prediction":
        # noise = (sigma x + sqrt(sigma^2 + 1) v) / (sigma^2 + 1), with x before it is scaled
        predict = np.stack([1 + change * sigma / whole**2, change / whole], -1)
    noise = whole.max() if betas.timestep_spacing == "leading" else sigma.max()
    return one_step(at, predict, 1 / whole, noise)


def known_sigmas(betas: Betas) -> Float[np.ndarray, " T"]:
    """Compute sigma at every time of the model's training."""
    alpha_bar = np.maximum(betas.alpha_bar(), TINY)
    return np.sqrt((1 - alpha_bar) / alpha_bar)


@dataclass(frozen=True)
class Betas:
    """Noise levels by time; the defaults are SDXL's.

    Args:
        beta_start, beta_end: the first and last beta.
        beta_schedule: evenly spaced between them: "linear" beta, "scaled_linear" its square root.
        num_train_timesteps: number of times.
        rescale_betas_zero_snr: rescale so that the last time is pure noise, with alpha_bar 0.
        timestep_spacing: "leading" counts times from the clean end, "trailing" from the noise,
            "linspace" includes both ends.
        steps_offset: added to the times of "leading".
        prediction_type: of the model: the noise ("epsilon") or v ("v_prediction").
    """

    beta_start: float = 0.00085
    beta_end: float = 0.012
    beta_schedule: Curve = "scaled_linear"
    num_train_timesteps: int = 1000
    rescale_betas_zero_snr: bool = False
    timestep_spacing: Spacing = "leading"
    steps_offset: int = 1
    prediction_type: Prediction = "epsilon"

    def alpha_bar(self) -> Float[np.ndarray, " T"]:
        """Compute alpha_bar at every time."""
        power = 0.5 if self.beta_schedule == "scaled_linear" else 1.0
        first, last = self.beta_start**power, self.beta_end**power
        betas = np.linspace(first, last, self.num_train_timesteps) ** (1 / power)
        alpha_bar = np.cumprod(1 - betas)
        if self.rescale_betas_zero_snr:
            root = np.sqrt(alpha_bar)
            alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        return alpha_bar

    def times(self, steps: int) -> Float[np.ndarray, " n"]:
        """Return the times of `steps`, the noisiest first; "linspace" gives fractions."""
        count = self.num_train_timesteps
        check(num_train_timesteps=count, steps=(steps, count))
        if self.timestep_spacing == "leading":
            return np.arange(steps)[::-1] * (count // steps) + float(self.steps_offset)
        if self.timestep_spacing == "trailing":
            return np.round(count - np.arange(steps) * (count / steps)) - 1.0
        # numpy's linspace of one number is its clean end, time 0.
        return np.linspace(0, count - 1, steps)[::-1]
