"""Euler steps along sigma, for models of discrete times.

    sigma = sqrt((1 - alpha_bar) / alpha_bar)
    x' = x + (sigma' - sigma) * noise,   the model sees x / sqrt(sigma^2 + 1)

Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364; as diffusers' EulerDiscreteScheduler.
"""

from __future__ import annotations

import numpy as np

from .betas import Betas
from .schedule import Schedule, one_step

TINY = 2.0**-24  # in the place of an alpha_bar of 0, where sigma would be infinite


def schedule(steps: int, betas: Betas | None = None) -> Schedule:
    """Make the schedule of Euler.

    Args:
        steps: calls of the model.
        betas: the noise that the model knows; default SDXL's.
    """
    betas = betas or Betas()
    alpha_bar, times = betas.alpha_bar(), betas.times(steps)
    alpha_bar = np.maximum(alpha_bar, TINY)
    known = np.sqrt((1 - alpha_bar) / alpha_bar)
    sigma = np.append(np.interp(times, np.arange(len(known)), known), 0.0)
    sigma, change = sigma[:-1], np.diff(sigma)
    whole = np.sqrt(sigma**2 + 1)
    predict = np.stack([np.ones(steps), change], -1)
    if betas.prediction_type == "v_prediction":
        # noise = (sigma x + sqrt(sigma^2 + 1) v) / (sigma^2 + 1), with x before it is scaled
        predict = np.stack([1 + change * sigma / whole**2, change / whole], -1)
    noise = whole.max() if betas.timestep_spacing == "leading" else sigma.max()
    return one_step(times, predict, 1 / whole, noise)
