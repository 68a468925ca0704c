"""Merge attention over parts of the keys into attention over all of them, by log-sum-exp, in float32.

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

A part in which a query sees nothing has LSE -inf and adds nothing; a query that sees nothing anywhere keeps -inf and 0.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

NEG_INF = float("-inf")

Partial = tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]


def merge(a: Partial, b: Partial) -> Partial:
    """Return (out float32, lse) over the keys of both parts."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    top = jnp.maximum(lse_a, lse_b)
    safe = jnp.where(top == NEG_INF, 0.0, top)
    weight_a, weight_b = jnp.exp(lse_a - safe), jnp.exp(lse_b - safe)
    total = weight_a + weight_b
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = _rows(weight_a / total) * out_a.astype(jnp.float32) + _rows(weight_b / total) * out_b.astype(jnp.float32)
    return out, jnp.where(seen, safe + jnp.log(total), NEG_INF)


def _rows(x: Float[Array, "B N T"]) -> Float[Array, "B T N 1"]:
    return jnp.swapaxes(x, 1, 2)[..., None]
