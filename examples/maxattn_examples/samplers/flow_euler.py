"""Flow matching in Euler steps.

    x' = x + (sigma' - sigma) * v,   sigma falls from 1 (noise) to 0 (clean)

Source: Esser et al. 2024, https://arxiv.org/abs/2403.03206. The grid of `schedule` is that of
diffusers' FlowMatchEulerDiscreteScheduler, which shifts its smallest sigma twice. Pipelines such as
Flux's pass the grid of `even` instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from maxattn.errors import InputError

from .schedule import Schedule, check, one_step


def shifted(sigma: Any, shift: float) -> Any:
    """Move sigmas (numpy, jax) towards the noise: shift s / (1 + (shift - 1) s)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def schedule(steps: int, shift: float = 1.0, *, train_steps: int = 1000) -> Schedule:
    """Make the schedule of flow-Euler.

    Args:
        steps: model calls.
        shift: above 1 puts more of the steps near the noise. Wan 2.1: 3 at 480p, 5 at 720p.
        train_steps: the model's time at sigma 1.
    """
    return over(usual_sigmas(steps, shift, train_steps), train_steps=train_steps)


def even(steps: int, shift: float = 1.0, *, train_steps: int = 1000) -> Schedule:
    """Make the schedule over the sigmas 1, (n - 1) / n, ... 1 / n, each shifted once, then 0.

    Args:
        steps: n, model calls.
        shift: above 1 puts more of the steps near the noise.
        train_steps: the model's time at sigma 1.
    """
    return over(even_sigmas(steps, shift, train_steps), train_steps=train_steps)


def usual_sigmas(steps: int, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
    """Return the sigmas of diffusers' flow-matching schedulers; arguments as for `schedule`."""
    check(shift, steps=steps, train_steps=train_steps)
    first, last = shifted(np.array([1.0, 1.0 / train_steps]), shift)
    return np.append(shifted(np.linspace(first, last, steps), shift), 0.0)


def even_sigmas(steps: int, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
    """Return the sigmas that FluxPipeline passes to its scheduler; arguments as for `even`."""
    check(shift, steps=steps, train_steps=train_steps)
    return np.append(shifted(np.linspace(1.0, 1.0 / steps, steps), shift), 0.0)


def shift_of(options: Mapping[str, Any], tokens: int) -> float:
    """Return the shift for a sample of `tokens`: larger samples get more noise.

    mu grows linearly, from base_shift at base_image_seq_len to max_shift at max_image_seq_len. The
    shift is e^mu, or mu itself if time_shift_type is linear.

    Args:
        options: of diffusers' FlowMatchEulerDiscreteScheduler; without use_dynamic_shifting the
            result is its `shift`.
    """
    if not options["use_dynamic_shifting"]:
        return options["shift"]
    low, high = options["base_image_seq_len"], options["max_image_seq_len"]
    slope = (options["max_shift"] - options["base_shift"]) / (high - low)
    mu = options["base_shift"] + slope * (tokens - low)
    return mu if options["time_shift_type"] == "linear" else math.exp(mu)


def over(sigmas: Float[np.ndarray, " n"], *, train_steps: int = 1000) -> Schedule:
    """Make the schedule of Euler steps over a grid of sigmas.

    Args:
        sigmas: falling from 1 to 0; the number of steps plus one.
        train_steps: the model's time at sigma 1.

    Raises:
        InputError: the sigmas do not fall, or are not between 0 and 1.
    """
    sigmas = checked(sigmas)
    change = np.diff(sigmas.astype(np.float64))
    predict = np.stack([np.ones_like(change), change], -1)
    return one_step(sigmas[:-1] * np.float32(train_steps), predict)


def checked(sigmas: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Return sigmas in float32, exactly as the model receives them.

    Raises:
        InputError: the sigmas do not fall, or are not between 0 and 1.
    """
    falls = sigmas.ndim == 1 and len(sigmas) > 1 and bool((np.diff(sigmas) < 0).all())
    sigmas = sigmas.astype(np.float32)
    if not falls or not 0 <= sigmas[-1] <= sigmas[0] <= 1:
        rule = "sigmas must fall from at most 1 to at least 0: one for each step, then the end"
        raise InputError(
            "sigmas", np.array2string(sigmas), rule, "give np.linspace(1, 0, steps + 1)"
        )
    return sigmas
