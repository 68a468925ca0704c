"""Samplers of flow matching: Euler steps, steps that re-noise, and UniPC.

sigma falls from 1 (noise) to 0 (clean), and v is the velocity that the model predicts.

Sources: Esser et al. 2024, https://arxiv.org/abs/2403.03206 (Euler, its grids); Song et al. 2023,
https://arxiv.org/abs/2303.01469, and Yin et al. 2024, https://arxiv.org/abs/2405.14867 (steps that
re-noise); Zhao et al. 2023, https://arxiv.org/abs/2302.04867 (UniPC). Each equals diffusers'
scheduler: FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler, UniPCMultistepScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from math import factorial
from typing import Any

import numpy as np
from jaxtyping import Float

from maxattn.errors import InputError

from .schedule import Schedule, check, one_step, schedule_of


def flow_euler(
    steps: int, shift: float = 1.0, *, even: bool = False, train_steps: int = 1000
) -> Schedule:
    """Make the schedule of Euler steps, x' = x + (sigma' - sigma) v.

    Args:
        steps: n, model calls.
        shift: above 1 puts more of the steps near the noise. Wan 2.1: 3 at 480p, 5 at 720p.
        even: over the sigmas 1, (n - 1) / n, ... 1 / n, each shifted once, then 0, as pipelines
            such as Flux's; else over those of diffusers' FlowMatchEulerDiscreteScheduler, which
            shifts its smallest sigma twice.
        train_steps: what sigma 1 is called as a time.
    """
    grid = even_sigmas if even else usual_sigmas
    return euler_over(grid(steps, shift, train_steps), train_steps=train_steps)


def euler_over(sigmas: Float[np.ndarray, " n"], *, train_steps: int = 1000) -> Schedule:
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


def flow_lcm(steps: int, shift: float = 1.0, *, train_steps: int = 1000) -> Schedule:
    """Make the schedule of steps that re-noise, over the grid of `flow_euler`.

    x0 = x - sigma v,   x' = (1 - sigma') x0 + sigma' z,   z new in every step.

    Models distilled to predict x0 from fresh noise (DMD, consistency models) need these steps,
    others the deterministic ones of `flow_euler`; with the wrong kind, samples are soft or broken.

    Args:
        steps: model calls.
        shift: above 1 puts more of the steps near the noise.
        train_steps: the model's time at sigma 1.
    """
    return lcm_over(usual_sigmas(steps, shift, train_steps), train_steps=train_steps)


def lcm_over(
    sigmas: Float[np.ndarray, " n"], *, train_steps: int = 1000, noise_scale: float = 1.0
) -> Schedule:
    """Make the schedule of `flow_lcm` over a grid of sigmas.

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


# ---- grids of sigmas -----------------------------------------------------------------------------


def shifted(sigma: Any, shift: float) -> Any:
    """Move sigmas (numpy, jax) towards the noise: shift s / (1 + (shift - 1) s)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def usual_sigmas(steps: int, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
    """Return the sigmas of diffusers' flow-matching schedulers; arguments as for `flow_euler`."""
    check(shift, steps=steps, train_steps=train_steps)
    first, last = shifted(np.array([1.0, 1.0 / train_steps]), shift)
    return np.append(shifted(np.linspace(first, last, steps), shift), 0.0)


def even_sigmas(steps: int, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
    """Return the sigmas that FluxPipeline passes on; arguments as for `flow_euler`."""
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


# ---- UniPC ---------------------------------------------------------------------------------------
# A multistep predictor, and a corrector without an extra model call. alpha = 1 - sigma,
# lambda = log(alpha / sigma), and m = x - sigma * v is the clean sample that the model predicts. A
# step of size h = lambda' - lambda and order p is
#
#     x' = (sigma' / sigma) x - alpha' (e^-h - 1) (m + sum_j rho_j (m_j - m) / r_j)
#
# over the p - 1 clean samples m_j of the steps before, r_j = (lambda_j - lambda) / h. The corrector
# repeats the step, with the model's output at its end as a further sample of r = 1. The
# rho solve a small linear system; where it has one unknown, rho = 1/2 as in diffusers.

Numbers = Float[np.ndarray, "..."]
NOT_ONE = 1e-6  # distance of the first sigma from 1, at which lambda would be infinite


def unipc(
    steps: int,
    shift: float = 1.0,
    *,
    order: int = 2,
    uncorrected: Collection[int] = (),
    train_steps: int = 1000,
) -> Schedule:
    """Make the schedule of UniPC for a model that predicts the velocity.

    Args:
        steps: model calls.
        shift: above 1 puts more of the steps near the noise. Wan 2.1: 3 at 480p, 5 at 720p.
        order: of the predictor, 1 to 3; the first and last steps have a lower one.
        uncorrected: steps without a corrector.
        train_steps: the model's time at sigma 1.
    """
    check(shift, steps=steps, order=(order, 3), train_steps=train_steps)
    sigmas = shifted(np.linspace(1, 1 / train_steps, steps + 1)[:-1], shift)
    sigmas[0] -= NOT_ONE if abs(sigmas[0] - 1) < NOT_ONE else 0.0
    sigmas = np.append(sigmas, 0.0)
    times = np.trunc(sigmas[:-1] * train_steps)
    # Sigmas are float32 numbers; near 1, 1 - sigma depends on it.
    sigmas = sigmas.astype(np.float32).astype(np.float64)
    orders = [min(order, i + 1, steps - i) for i in range(steps)]
    remember = np.stack([np.ones(steps), -sigmas[:-1]], -1)
    predict, correct = np.zeros((steps, 2 + order)), np.zeros((steps, 3 + order))
    for i in range(steps):
        predict[i, : 1 + orders[i]] = _predictor(sigmas, i, orders[i])
        if i == 0 or i - 1 in uncorrected:
            correct[i, 0] = 1.0
        else:
            correct[i, 1 : 3 + orders[i - 1]] = _corrector(sigmas, i, orders[i - 1])
    return schedule_of(1.0, times, np.ones(steps), remember, correct, predict)


def _predictor(sigmas: Numbers, i: int, p: int) -> Numbers:
    """Compute the coefficients of x, m and the p - 1 clean samples before, from step i to i + 1."""
    h, ratios = _step(sigmas, i, i + 1, p)
    if p == 1:  # the last step has an infinite h
        return _coefficients(sigmas, i, i + 1, np.expm1(-h), ratios)
    phi, rhs = _series(h, p)
    rho = _solved(ratios, rhs[:-1])
    return _coefficients(sigmas, i, i + 1, phi, phi * rho / ratios)


def _corrector(sigmas: Numbers, i: int, p: int) -> Numbers:
    """Compute the coefficients of the last x, m at i, m at i - 1 and the p - 1 samples before.

    They repeat the step from i - 1 to i.
    """
    h, ratios = _step(sigmas, i - 1, i, p)
    ratios = np.append(ratios, 1.0)
    phi, rhs = _series(h, p)
    rho = _solved(ratios, rhs)
    x, m, *before, here = _coefficients(sigmas, i - 1, i, phi, phi * rho / ratios)
    return np.array([x, here, m, *before])


def _solved(ratios: Numbers, rhs: Numbers) -> Numbers:
    """Return the rho: 1/2 for one unknown, as in diffusers, else the linear system's solution."""
    if len(ratios) == 1:
        return np.array([0.5])
    return np.linalg.solve(np.vander(ratios, len(ratios), increasing=True).T, rhs)


def _step(sigmas: Numbers, begin: int, end: int, p: int) -> tuple[float, Numbers]:
    """Return h and the r_j of the p - 1 steps before."""
    with np.errstate(divide="ignore"):
        lambdas = np.log1p(-sigmas) - np.log(sigmas)  # infinite at the end, sigma 0
    h = lambdas[end] - lambdas[begin]
    return h, (lambdas[begin - p + 1 : begin][::-1] - lambdas[begin]) / h


def _series(h: float, p: int) -> tuple[float, Numbers]:
    """Return B = e^-h - 1 (variant bh2), and the right-hand sides phi_k k! / B for k = 1..p."""
    phi = term = np.expm1(-h)
    found = []
    for k in range(1, p + 1):
        term = term / -h - 1 / factorial(k)
        found.append(term * factorial(k) / phi)
    return phi, np.array(found)


def _coefficients(sigmas: Numbers, begin: int, end: int, phi: float, weights: Numbers) -> Numbers:
    """Compute the coefficients of x, m and the other clean samples m_j, from weights of m_j - m."""
    alpha = 1 - sigmas[end]
    of_x, of_m = sigmas[end] / sigmas[begin], alpha * (weights.sum() - phi)
    return np.array([of_x, of_m, *(-alpha * weights)])
