"""Latent consistency steps, which re-noise, for models of discrete times.

    x0 = (x - sqrt(1 - alpha_bar) noise) / sqrt(alpha_bar),   with the model's noise
    c  = c_out x0 + c_skip x,   c_skip = d^2 / ((s t)^2 + d^2),   c_out = s t / sqrt((s t)^2 + d^2)
    x' = sqrt(alpha_bar') c + sqrt(1 - alpha_bar') z,   z new in every step; the last x' is c

d = 1/2 is the spread of the data, s the option `timestep_scaling`.

Source: Luo et al. 2023, https://arxiv.org/abs/2310.04378; as diffusers' LCMScheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from .euler import Betas
from .schedule import Schedule, check, one_step

SPREAD = 0.5


def schedule(
    steps: int,
    betas: Betas | None = None,
    *,
    times: Sequence[int] | None = None,
    original_inference_steps: int = 50,
    timestep_scaling: float = 10.0,
) -> Schedule:
    """Make the schedule of LCM.

    Args:
        steps: model calls.
        betas: the noise levels of the model's training; default SDXL's.
        times: descending; default evenly chosen from the distillation's.
        original_inference_steps: number of times in the distillation.
        timestep_scaling: s; a larger one puts less of the noisy sample into the clean one.
    """
    betas = betas or Betas()
    t = usual_times(steps, betas, original_inference_steps) if times is None else np.array(times)
    known = betas.alpha_bar()[t]
    a, b = np.sqrt(known), np.sqrt(1 - known)
    a_there, b_there = np.append(a[1:], 1.0), np.append(b[1:], 0.0)
    of_noisy, of_clean = _boundary(t * timestep_scaling)
    if betas.prediction_type == "v_prediction":
        clean = np.stack([a, -b], -1)
    else:
        clean = np.stack([1 / a, -b / a], -1)
    whole = of_clean[:, None] * clean + np.stack([of_noisy, np.zeros(len(t))], -1)
    return one_step(t, a_there[:, None] * whole, fresh=b_there)


def usual_times(steps: int, betas: Betas, original: int) -> np.ndarray:
    """Return the times of `steps`, evenly chosen from those of the distillation.

    Args:
        steps: model calls, at most `original`.
        original: number of times in the distillation.
    """
    count = betas.num_train_timesteps
    check(original_inference_steps=(original, count), steps=(steps, original))
    distilled = np.arange(original, 0, -1) * (count // original) - 1
    return distilled[np.linspace(0, original, steps, endpoint=False).astype(int)]


def _boundary(scaled: Float[np.ndarray, " n"]) -> tuple[np.ndarray, np.ndarray]:
    """Return c_skip and c_out of scaled times."""
    whole = scaled**2 + SPREAD**2
    return SPREAD**2 / whole, scaled / np.sqrt(whole)
