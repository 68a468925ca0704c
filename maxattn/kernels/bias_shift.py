"""What is taken off each row of an additive bias, so that its LSE stays within float32's reach.

A row whose every key has a bias of -1e9, as an example that is all padding gets it, has an LSE of
-1e9 + log(S). Of log(S) float32 keeps nothing there, and exp(score - LSE) would be 1 for each of S
keys instead of 1 / S.

    softmax(s + b) = softmax(s + b - shift)        LSE(s + b) = LSE(s + b - shift) + shift
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Rows below stay as they are. At 128 float32 keeps 2**-17 of a score; of a half-precision bias a
# difference would be rounded, so there a row must be so large that what is rounded is far from its
# top.
LARGE = {"float32": 2.0**7, "bfloat16": 2.0**12, "float16": 2.0**12}


def bias_shift(bias: Float[Array, "#B #N #T #S"]) -> Float[Array, "#B #N #T 1"]:
    """Return what all keys of a row share, hidden ones too: no entry is farther from 0 without it.

    The largest entry where all are far below 0, the smallest finite one where all are far above,
    else 0; float32, and a constant for gradients.
    """
    x, limit = jax.lax.stop_gradient(bias).astype(jnp.float32), LARGE[str(bias.dtype)]
    top = x.max(3, keepdims=True)
    bottom = jnp.where(jnp.isfinite(x), x, jnp.inf).min(3, keepdims=True)
    below, above = jnp.isfinite(top) & (top < -limit), jnp.isfinite(bottom) & (bottom > limit)
    return jnp.where(below, top, jnp.where(above, bottom, 0.0))


def shifted(bias: Float[Array, "#B #N #T #S"]) -> Float[Array, "#B #N #T #S"]:
    """Return the bias without its shift, in its dtype."""
    return (bias.astype(jnp.float32) - bias_shift(bias)).astype(bias.dtype)
