"""Flow matching in Euler steps: x' = x + (sigma' - sigma) * v, where sigma falls from 1 (noise) to 0 (clean).

Source: Esser et al. 2024, https://arxiv.org/abs/2403.03206; the grid of sigmas is that of diffusers'
FlowMatchEulerDiscreteScheduler, which shifts its smallest sigma twice.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from .schedule import Schedule, one_step


def shifted(sigma: Float[np.ndarray, "..."], shift: float) -> Float[np.ndarray, "..."]:
    """Move sigmas towards the noise: shift s / (1 + (shift - 1) s); 1 leaves them where they are."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def schedule(steps: int, shift: float = 1.0, *, train_steps: int = 1000) -> Schedule:
    """Make the schedule of flow-Euler.

    Args:
        steps: calls of the model.
        shift: above 1: more of the steps near the noise. Wan 2.1: 3 at 480p, 5 at 720p.
        train_steps: what sigma 1 is called as a time.
    """
    first, last = shifted(np.array([1.0, 1.0 / train_steps]), shift)
    # Sigmas are float32 numbers: the model is told these very times.
    sigmas = np.append(shifted(np.linspace(first, last, steps), shift), 0.0).astype(np.float32)
    change = np.diff(sigmas.astype(np.float64))
    return one_step(sigmas[:-1] * np.float32(train_steps), np.stack([np.ones(steps), change], -1))
