"""How a block is denoised: the times of its steps, the steps, and the noise of its clean pass.

    x0 = x - sigma v                                    sigma = time / 1000, v the velocity
    few_step:    x' = (1 - sigma') x0 + sigma' noise    fresh noise in every step
    flow_euler:  x' = x + (sigma' - sigma) v

Few-step models were trained to predict x0 from fresh noise at exactly these times; others need
Euler steps. Lists of times are often written before a shift towards the noise: entry s of 1000 is
then the time 1000 shift u / (1 + (shift - 1) u), u = s / 1000.

Source: Huang et al. 2025, Self Forcing, https://arxiv.org/abs/2506.08009
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn.errors import InputError
from maxattn_examples.samplers.flow import shifted

SAMPLERS = ("few_step", "flow_euler")
TRAINING_TIMES = 1000


@dataclass(frozen=True)
class Denoising:
    """How a block is denoised.

    Args:
        denoising_steps: times of the steps, descending, at most 1000.
        warp_steps: whether the shift is applied to these times.
        timestep_shift: above 1 puts more of the steps near the noise.
        sampler: "few_step" or "flow_euler".
        context_noise: share of noise in the clean pass over a block, and its time; 0 for models
            that
            were trained on context without noise.
        clean_pass: False leaves it out: later blocks then attend to keys and values of the last
            step's noisy input, which no model is trained for; for comparison only.
        guidance_scale: of classifier-free guidance; 1 turns it off. Otherwise the condition has two
            batch rows for each video, the negative ones first.

    Raises:
        InputError: a number is out of range.

    >>> Denoising().times.tolist()
    [1000.0, 937.5, 833.3333129882812, 625.0]
    """

    denoising_steps: tuple[float, ...] = (1000, 750, 500, 250)
    warp_steps: bool = True
    timestep_shift: float = 5.0
    sampler: str = "few_step"
    context_noise: float = 0.0
    clean_pass: bool = True
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def times(self) -> Float[np.ndarray, " n"]:
        """The model's times in the steps, 1000 for noise."""
        return self.sigmas[:-1] * np.float32(TRAINING_TIMES)

    @property
    def sigmas(self) -> Float[np.ndarray, " n+1"]:
        """The share of noise before each step, then 0."""
        u = np.asarray(self.denoising_steps, np.float64) / TRAINING_TIMES
        sigmas = shifted(u, self.timestep_shift) if self.warp_steps else u
        return np.append(sigmas, 0.0).astype(np.float32)

    @property
    def rows(self) -> int:
        """Batch rows of the model per video."""
        return 1 if self.guidance_scale == 1 else 2

    def step(self, x: Array, velocity: Array, sigmas: Any, noise: Array) -> Array:
        """Return the sample after a step.

        Args:
            x: the sample, float32.
            velocity: the model's prediction.
            sigmas: of this sample, and of the next.
            noise: fresh, of the shape of x.
        """
        sigma, after = sigmas
        if self.sampler == "flow_euler":
            return x + (after - sigma) * velocity
        return noised(x - sigma * velocity, after, noise)

    def guided(self, velocity: Float[Array, "R ..."]) -> Float[Array, "B ..."]:
        """Apply classifier-free guidance, if there are negative rows."""
        if self.rows == 1:
            return velocity
        without, with_ = jnp.split(velocity, 2)
        return without + self.guidance_scale * (with_ - without)


def noised(clean: Array, sigma: Any, noise: Array) -> Array:
    """Mix a clean sample with noise: (1 - sigma) clean + sigma noise."""
    return (1 - sigma) * clean + sigma * noise


def _check(how: Denoising) -> None:
    times, shift, noise = how.denoising_steps, how.timestep_shift, how.context_noise
    falls = all(a > b for a, b in pairwise(times))
    if not times or not falls or not 0 < times[-1] <= times[0] <= TRAINING_TIMES:
        rule = "times fall from at most 1000, pure noise, and end above 0"
        raise InputError("denoising_steps", times, rule, "write such as 1000, 750, 500, 250")
    if not 0 < shift < math.inf:
        rule = "it multiplies the odds of noise: a positive number"
        raise InputError("timestep_shift", shift, rule, "write 1 for no shift")
    if how.sampler not in SAMPLERS:
        remedy = "use few_step for a few-step model, flow_euler for an ordinary one"
        raise InputError(
            "sampler", repr(how.sampler), f"it is one of {', '.join(SAMPLERS)}", remedy
        )
    if not 0 <= noise < 1:
        rule = "it is the share of noise in clean frames: at least 0, below 1"
        remedy = "write 0, or the share that the model was trained with"
        raise InputError("context_noise", noise, rule, remedy)
    if noise and not how.clean_pass:
        rule = "it is the noise of the clean pass, and clean_pass is false"
        raise InputError("context_noise", noise, rule, "set it to 0, or clean_pass")
    if not 0 <= (scale := how.guidance_scale) < math.inf:
        remedy = "write 1 for the model as it is"
        raise InputError("guidance_scale", scale, "it is a number of at least 0", remedy)
