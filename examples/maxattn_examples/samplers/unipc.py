"""UniPC for flow matching: a multistep predictor, and a corrector without an extra model call.

sigma falls from 1 to 0; alpha = 1 - sigma, lambda = log(alpha / sigma), and m = x - sigma * v is
the clean sample that the model predicts. A step of size h = lambda' - lambda and order p is

    x' = (sigma' / sigma) x - alpha' (e^-h - 1) (m + sum_j rho_j (m_j - m) / r_j)

over the p - 1 clean samples m_j of the steps before, r_j = (lambda_j - lambda) / h. The corrector
repeats the step, with the model's output at its end as a further sample of r = 1. The rho solve a
small linear system.

Source: Zhao et al. 2023, https://arxiv.org/abs/2302.04867. The grid of sigmas, and rho = 1/2 for a
system of one unknown, are those of diffusers' UniPCMultistepScheduler.
"""

from __future__ import annotations

from collections.abc import Collection
from math import factorial

import numpy as np
from jaxtyping import Float

from .flow_euler import shifted
from .schedule import Schedule, check, schedule_of

Numbers = Float[np.ndarray, "..."]
NOT_ONE = 1e-6  # distance of the first sigma from 1, at which lambda would be infinite


def schedule(
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
    sigmas = _sigmas(steps, shift, train_steps)
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


def _sigmas(steps: int, shift: float, train_steps: int) -> Numbers:
    sigmas = shifted(np.linspace(1, 1 / train_steps, steps + 1)[:-1], shift)
    sigmas[0] -= NOT_ONE if abs(sigmas[0] - 1) < NOT_ONE else 0.0
    return np.append(sigmas, 0.0)


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
