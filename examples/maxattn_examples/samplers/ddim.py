"""DDIM with eta = 0, which adds no noise, for models of discrete times.

    x' = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar') noise,   with the model's x0 and noise

Source: Song et al. 2020, https://arxiv.org/abs/2010.02502; as diffusers' DDIMScheduler.
"""

from __future__ import annotations

import numpy as np

from .euler import Betas
from .schedule import Schedule, one_step


def schedule(steps: int, betas: Betas | None = None, *, set_alpha_to_one: bool = False) -> Schedule:
    """Make the schedule of DDIM.

    Args:
        steps: model calls, at most the number of training times.
        betas: the noise levels of the model's training; default SDXL's.
        set_alpha_to_one: whether the last step ends at alpha_bar 1, clean, or at the first time's.
    """
    betas = betas or Betas()
    known, times = betas.alpha_bar(), np.round(betas.times(steps)).astype(int)
    before = times - betas.num_train_timesteps // steps
    last = 1.0 if set_alpha_to_one else known[0]
    there = np.where(before >= 0, known[np.maximum(before, 0)], last)
    (a, b), (a_there, b_there) = ((np.sqrt(x), np.sqrt(1 - x)) for x in (known[times], there))
    if betas.prediction_type == "v_prediction":
        # x0 = a x - b v, noise = b x + a v
        predict = np.stack([a_there * a + b_there * b, b_there * a - a_there * b], -1)
    else:
        # x0 = (x - b noise) / a
        predict = np.stack([a_there / a, b_there - a_there * b / a], -1)
    return one_step(times, predict)
