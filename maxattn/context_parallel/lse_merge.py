"""Merge attention over disjoint sets of keys into attention over all of them, in float32.

    lse = log(exp(lse_1) + exp(lse_2))        out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

A part in which a query sees nothing has LSE -inf and adds nothing; a query that sees nothing
anywhere keeps -inf and 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.base import Result

NEG_INF = float("-inf")

Partial = Result | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]


def merge(a: Partial, b: Partial) -> Result:
    """Return (out float32, lse) over the keys of both parts."""
    return merge_all((a, b))


def merge_all(parts: Sequence[Partial]) -> Result:
    """Return (out float32, lse) over the keys of all parts, in one pass."""
    if len(parts) == 1:
        return Result(parts[0][0].astype(jnp.float32), parts[0][1])
    top = reduce(jnp.maximum, (lse for _, lse in parts))
    safe = jnp.where(top == NEG_INF, 0.0, top)
    weights = [jnp.exp(lse - safe) for _, lse in parts]
    total = reduce(add, weights)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    pairs = zip(weights, parts, strict=True)
    out = reduce(add, (_rows(w / total) * out.astype(jnp.float32) for w, (out, _) in pairs))
    return Result(out, jnp.where(seen, safe + jnp.log(total), NEG_INF))


def nothing_seen(shapes: Any) -> Result:
    """Return the result of queries that see nothing, float32, in the given shapes."""
    out, lse = shapes
    return Result(jnp.zeros(out.shape, jnp.float32), jnp.full(lse.shape, NEG_INF, jnp.float32))


def _rows(x: Float[Array, "B N T"]) -> Float[Array, "B T N 1"]:
    return jnp.swapaxes(x, 1, 2)[..., None]
