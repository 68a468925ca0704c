"""Classifier-free guidance by step: v = c, or u + scale (c - u), or what a gate makes of it.

c is the prediction with the text, u without. A gate reuses the last difference c - u, so that a
step predicts once. CFG-Zero* fits u to c before they are mixed: u <- u (c . u) / |u|^2, one factor
a sample. A third prediction s that skips layers leads v away from it: v + scale (c - s), or without
u: s + scale (c - s). A rescaled v has a share of the standard deviation of c.

Sources: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598; interval: Kynkaanniemi et al. 2024,
https://arxiv.org/abs/2404.07724; gate: Castillo et al. 2023, https://arxiv.org/abs/2312.12487;
CFG-Zero*: Fan et al. 2025, https://arxiv.org/abs/2503.18886; rescale: Lin et al. 2023,
https://arxiv.org/abs/2305.08891; skipped layers: https://github.com/Stability-AI/sd3.5, and in the
prediction without the text: https://github.com/kohya-ss/musubi-tuner/pull/186.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from .settings import GuidanceSettings

Prediction = Float[Array, "B ..."]
SMALL = 1e-8  # beside |u|^2


class Predictions(NamedTuple):
    """The predictions of a step.

    Args:
        with_: the text.
        without: the text; or with the negative prompt.
        skipping: some layers, with the text.
    """

    with_: Prediction
    without: Prediction | None = None
    skipping: Prediction | None = None

    def fitted(self, how: GuidanceSettings) -> Self:
        """Fit the prediction without the text to the other one, if settings ask for it."""
        with_, without = self.with_, self.without
        if without is None or not how.zero_star:
            return self
        products = jnp.sum(with_ * without, axis=_inner(with_), keepdims=True)
        squares = jnp.sum(without * without, axis=_inner(with_), keepdims=True)
        return self._replace(without=without * (products / (squares + SMALL)))

    @property
    def difference(self) -> Prediction:
        """What a gate reuses."""
        assert self.without is not None, "a guided step has both"
        return self.with_ - self.without

    def mixed(
        self, scale: Any, how: GuidanceSettings, difference: Prediction | None = None
    ) -> Prediction:
        """Return the guided prediction.

        Args:
            scale: of guidance.
            how: they are mixed, besides `fitted`.
            difference: of an earlier step, for a gate.
        """
        with_, without, skipping = self
        if without is not None:
            mixed = without + scale * (with_ - without)
        elif difference is not None:
            mixed = with_ + (scale - 1) * difference
        elif skipping is not None:
            mixed = skipping
        else:
            return with_
        if skipping is not None:
            assert how.skip is not None, "it says which layers are skipped"
            mixed = mixed + how.skip.third_scale * (with_ - skipping)
        return rescaled(mixed, with_, how.rescale)


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
