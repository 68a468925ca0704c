"""Flow matching in steps that re-noise: predict a clean sample, and mix it with new noise.

    x0 = x - sigma v
    x' = (1 - sigma') x0 + sigma' z,   z new in every step, sigma falls from 1 (noise) to 0 (clean)

Models distilled to predict x0 from fresh noise (DMD, consistency models) need these steps, others
the deterministic ones of `flow_euler`; with the wrong kind, samples are soft or broken.

Source: Song et al. 2023, https://arxiv.org/abs/2303.01469; Yin et al. 2024, Improved Distribution
Matching Distillation, https://arxiv.org/abs/2405.14867; as diffusers' FlowMatchLCMScheduler.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from .flow_euler import checked, usual_sigmas
from .schedule import Schedule, one_step


def schedule(steps: int, shift: float = 1.0, *, train_steps: int = 1000) -> Schedule:
    """Make the schedule of flow-LCM over the grid of `flow_euler.schedule`.

    Args:
        steps: model calls.
        shift: above 1 puts more of the steps near the noise.
        train_steps: the model's time at sigma 1.
    """
    return over(usual_sigmas(steps, shift, train_steps), train_steps=train_steps)


def over(
    sigmas: Float[np.ndarray, " n"], *, train_steps: int = 1000, noise_scale: float = 1.0
) -> Schedule:
    """Make the schedule of steps that re-noise over a grid of sigmas.

    Args:
        sigmas: falling from 1 to 0; the number of steps plus one.
        train_steps: the model's time at sigma 1.
        noise_scale: factor of standard normal noise in the first sample.

    Raises:
        InputError: the sigmas do not fall, or are not between 0 and 1.
    """
    sigmas = checked(sigmas)
    now, then = sigmas[:-1].astype(np.float64), sigmas[1:].astype(np.float64)
    predict = np.stack([1 - then, -(1 - then) * now], -1)
    times = sigmas[:-1] * np.float32(train_steps)
    return one_step(times, predict, noise_scale=noise_scale, fresh=then)
