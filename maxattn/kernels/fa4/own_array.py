"""Operands of FlashAttention-4's backward: arrays of their own."""

from __future__ import annotations

import jax
from jaxtyping import Array


def own_array(x: Array) -> Array:
    """Return an array as one of its own.

    XLA hands slices to a custom call without a copy, but then forgets which results share the
    memory of which operands (jax 0.11.2): the float32 sums, which the kernel adds to in place,
    would begin as garbage.
    """
    return jax.lax.optimization_barrier(x)
