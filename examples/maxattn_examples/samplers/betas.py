"""Noise schedules of models of a thousand discrete times, and the choice among those times.

    alpha_bar_t = prod_{s <= t} (1 - beta_s)
    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) noise

Source: Ho et al. 2020, https://arxiv.org/abs/2006.11239
Source of zero terminal SNR and the spacings: Lin et al. 2023, https://arxiv.org/abs/2305.08891
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from .schedule import check

Curve = Literal["linear", "scaled_linear"]
Spacing = Literal["leading", "trailing", "linspace"]
Prediction = Literal["epsilon", "v_prediction"]


@dataclass(frozen=True)
class Betas:
    """How noise grows with time; the defaults are SDXL's.

    Args:
        beta_start, beta_end: the first and last beta.
        beta_schedule: spaced evenly between them: "linear" beta, "scaled_linear" its square
            root.
        num_train_timesteps: how many times there are.
        rescale_betas_zero_snr: stretch it until nothing is left of the sample at the last time,
            where alpha_bar is 0.
        timestep_spacing: which times: "leading" counts from the clean end, "trailing" from the
            noise, "linspace" has both ends.
        steps_offset: added to the times of "leading".
        prediction_type: the model's prediction: the noise ("epsilon") or v ("v_prediction").
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
        """Compute alpha_bar of every time."""
        power = 0.5 if self.beta_schedule == "scaled_linear" else 1.0
        first, last = self.beta_start**power, self.beta_end**power
        betas = np.linspace(first, last, self.num_train_timesteps) ** (1 / power)
        alpha_bar = np.cumprod(1 - betas)
        if self.rescale_betas_zero_snr:
            root = np.sqrt(alpha_bar)
            alpha_bar = ((root - root[-1]) * root[0] / (root[0] - root[-1])) ** 2
        return alpha_bar

    def times(self, steps: int) -> Float[np.ndarray, " n"]:
        """Choose the times of so many steps, the noisiest first; "linspace" gives fractions."""
        count = self.num_train_timesteps
        check(num_train_timesteps=count, steps=(steps, count))
        if self.timestep_spacing == "leading":
            return np.arange(steps)[::-1] * (count // steps) + float(self.steps_offset)
        if self.timestep_spacing == "trailing":
            return np.round(count - np.arange(steps) * (count / steps)) - 1.0
        # numpy's linspace of one number is its clean end, time 0.
        return np.linspace(0, count - 1, steps)[::-1]
