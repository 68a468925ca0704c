"""Samplers of models of a thousand discrete times: Euler steps along sigma, DDIM, and LCM.

    alpha_bar_t = prod_{s <= t} (1 - beta_s)
    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) noise
    sigma = sqrt((1 - alpha_bar) / alpha_bar)

Sources: Ho et al. 2020, https://arxiv.org/abs/2006.11239; of zero terminal SNR and the spacings,
Lin et al. 2023, https://arxiv.org/abs/2305.08891; Karras et al. 2022,
https://arxiv.org/abs/2206.00364 (Euler); Song et al. 2020, https://arxiv.org/abs/2010.02502 (DDIM);
Luo et al. 2023, https://arxiv.org/abs/2310.04378 (LCM). Each equals diffusers'
scheduler: EulerDiscreteScheduler, DDIMScheduler, LCMScheduler.
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


def euler(
    steps: int,
    betas: Betas | None = None,
    *,
    times: Sequence[float] | None = None,
    sigmas: Sequence[float] | None = None,
) -> Schedule:
    """Make the schedule of Euler steps along sigma.

    x' = x + (sigma' - sigma) * noise,   the model's input is x / sqrt(sigma^2 + 1)

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


def ddim(steps: int, betas: Betas | None = None, *, set_alpha_to_one: bool = False) -> Schedule:
    """Make the schedule of DDIM with eta = 0, which adds no noise.

    x' = sqrt(alpha_bar') x0 + sqrt(1 - alpha_bar') noise,   with the model's x0 and noise

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


# ---- latent consistency steps, which re-noise ----------------------------------------------------
#
#     x0 = (x - sqrt(1 - alpha_bar) noise) / sqrt(alpha_bar),   with the model's noise
#     c  = c_out x0 + c_skip x
#     c_skip = d^2 / ((s t)^2 + d^2),   c_out = s t / sqrt((s t)^2 + d^2)
#     x' = sqrt(alpha_bar') c + sqrt(1 - alpha_bar') z,   z new in every step; the last x' is c

SPREAD = 0.5  # d, of the data


def lcm(
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
    scaled = t * timestep_scaling
    spread = scaled**2 + SPREAD**2
    of_noisy, of_clean = SPREAD**2 / spread, scaled / np.sqrt(spread)  # c_skip and c_out
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
