"""Flow matching in steps that re-noise: a clean sample from the model's velocity, and new noise.

    x0 = x - sigma v
    x' = (1 - sigma') x0 + sigma' z,   z new in every step, sigma falls from 1 (noise) to 0 (clean)

Models distilled to predict x0 from fresh noise take these steps (DMD, consistency models); the
steps of `flow_euler` are deterministic, and the one kind of model draws soft or broken samples with
the steps of the other.

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
        steps: calls of the model.
        shift: above 1: more of the steps near the noise.
        train_steps: what sigma 1 is called as a time.
    """
    return over(usual_sigmas(steps, shift, train_steps), train_steps=train_steps)


def over(
    sigmas: Float[np.ndarray, " n"], *, train_steps: int = 1000, noise_scale: float = 1.0
) -> Schedule:
    """Make the schedule of steps that re-noise over a grid of sigmas.

    Args:
        sigmas: falling from 1 to 0, one more than there are steps.
        train_steps: what sigma 1 is called as a time.
        noise_scale: multiplies standard normal noise to give the first sample.

    Raises:
        InputError: the sigmas do not fall, or are not from 0 to 1.
    """
    sigmas = checked(sigmas)
    now, then = sigmas[:-1].astype(np.float64), sigmas[1:].astype(np.float64)
    predict = np.stack([1 - then, -(1 - then) * now], -1)
    times = sigmas[:-1] * np.float32(train_steps)
    return one_step(times, predict, noise_scale=noise_scale, fresh=then)
