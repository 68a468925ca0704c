"""Euler steps along sigma, for models of discrete times.

    sigma = sqrt((1 - alpha_bar) / alpha_bar)
    x' = x + (sigma' - sigma) * noise,   the model sees x / sqrt(sigma^2 + 1)

Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364; as diffusers' EulerDiscreteScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .betas import Betas
from .schedule import Schedule, one_step

TINY = 2.0**-24  # in the place of an alpha_bar of 0, where sigma would be infinite


def schedule(
    steps: int,
    betas: Betas | None = None,
    *,
    times: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """Make the schedule of Euler.

    Args:
        steps: calls of the model.
        betas: the noise that the model knows; default SDXL's.
        times: of the steps, falling; default evenly spaced, as `betas` says.
        sigmas: of the steps, falling, in the place of times.
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
    """Compute sigma of every time that the model knows."""
    alpha_bar = np.maximum(betas.alpha_bar(), TINY)
    return np.sqrt((1 - alpha_bar) / alpha_bar)
