"""Classifier-free guidance by step: v = c, or u + scale (c - u), or what a gate makes of it.

c is the prediction with the text, u without. A gate reuses the last difference c - u, so that a
step predicts once. CFG-Zero* fits u to c before they are mixed: u <- u (c . u) / |u|^2, one factor
a sample. A rescaled v has a share of the standard deviation of c.

Sources: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598; interval: Kynkaanniemi et al. 2024,
https://arxiv.org/abs/2404.07724; gate: Castillo et al. 2023, https://arxiv.org/abs/2312.12487;
CFG-Zero*: Fan et al. 2025, https://arxiv.org/abs/2503.18886; rescale: Lin et al. 2023,
https://arxiv.org/abs/2305.08891.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from .settings import GuidanceSettings

Prediction = Float[Array, "B ..."]
SMALL = 1e-8  # beside |u|^2


class Both(NamedTuple):
    """Two predictions of a sample.

    Args:
        without: the text.
        with_: the text.
    """

    without: Prediction
    with_: Prediction

    def mixed(self, scale: Any, how: GuidanceSettings) -> Prediction:
        """Return the guided prediction."""
        without, with_ = self
        if how.zero_star:
            products = jnp.sum(with_ * without, axis=_inner(with_), keepdims=True)
            squares = jnp.sum(without * without, axis=_inner(with_), keepdims=True)
            without = without * (products / (squares + SMALL))
        return rescaled(without + scale * (with_ - without), with_, how.rescale)


def gated(with_: Prediction, difference: Prediction, scale: Any, rescale: float) -> Prediction:
    """Return the guided prediction, with the difference that an earlier step had."""
    return rescaled(with_ + (scale - 1) * difference, with_, rescale)


def rescaled(mixed: Prediction, with_: Prediction, share: float) -> Prediction:
    """Give a prediction a share of the standard deviation that another has."""
    if share == 0:
        return mixed
    ratio = jnp.std(with_, axis=_inner(with_), keepdims=True, ddof=1) / jnp.std(
        mixed, axis=_inner(with_), keepdims=True, ddof=1
    )
    return share * (mixed * ratio) + (1 - share) * mixed


def _inner(x: Array) -> tuple[int, ...]:
    return tuple(range(1, x.ndim))
