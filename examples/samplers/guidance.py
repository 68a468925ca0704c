"""Classifier-free guidance: y = y(without) + scale (y(with) - y(without)).

Both are rows of one call, those without the text first, or two calls: the numbers are the same.

Source: Ho and Salimans 2022, https://arxiv.org/abs/2207.12598
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

Call = Callable[[Float[Array, "B ..."], Float[Array, " B"], Any], Array]


def guided(call: Call, told: tuple[Any, ...], scale: Any) -> Callable[[Array, Array], Array]:
    """Return the model as a function of sample and time.

    Args:
        call: the model, of samples, times and conditions.
        told: the conditions of each call. One for the model alone, or for both rows in one call;
            two for two calls, the negative ones first.
        scale: a number, or traced. The number 1 is the model alone: `told` then has as many rows as
            there are samples.
    """

    def at(x: Array, t: Array, what: Any) -> Array:
        return call(x, jnp.broadcast_to(t, x.shape[:1]), what).astype(jnp.float32)

    def predict(x: Array, t: Array) -> Array:
        if not isinstance(scale, Array) and scale == 1:
            return at(x, t, told[0])
        if len(told) == 2:
            without, with_ = (at(x, t, what) for what in told)
        else:
            without, with_ = jnp.split(at(jnp.concatenate([x, x]), t, told[0]), 2)
        return without + scale * (with_ - without)

    return predict
