"""What one tile adds to the gradients, with keys along the sublanes.

    P^T = exp2(k q^T - lse)      dS^T = P^T * (v dO^T - delta)
    dV^T += dO^T P               dK^T += q^T dS               dQ^T += k^T dS^T

The exact LSE is known, so nothing follows a maximum. The gradients are transposed too: then weights
and dS are what a matrix unit holds, and the head dim is what it is fed with. A unit of 256 x 256
would hold a head dim of 128 in half of its columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class Gradients(NamedTuple):
    """Hold the sums of a block of keys, in VMEM.

    Args:
        dk, dv: [H, block_kv] float32.
        k: [H, block_kv], the keys transposed.
    """

    dk: Any
    dv: Any
    k: Any

    def clear(self, k: Float[Array, "C H"]) -> None:
        """Begin a block of keys."""
        self.dk[...] = jnp.zeros(self.dk.shape, jnp.float32)
        self.dv[...] = jnp.zeros(self.dv.shape, jnp.float32)
        self.k[...] = k.T


class Queries(NamedTuple):
    """Hold what the backward reads of a block of queries.

    Args:
        q, dout: [H, block_q]; q is multiplied by the scale and by log2(e).
        lse: [1, block_q], in base 2.
        delta: [1, block_q].
    """

    q: Float[Array, "H q"]
    dout: Float[Array, "H q"]
    lse: Float[Array, "1 q"]
    delta: Float[Array, "1 q"]


def weights(
    k: Float[Array, "C H"], queries: Queries, allowed: Bool[Array, "C q"] | None
) -> Float[Array, "C q"]:
    """Compute P^T; a pair that may not attend has none."""
    p = jnp.exp2(_product(k, queries.q, 1, 0) - queries.lse)
    return p if allowed is None else jnp.where(allowed, p, 0.0)


def add_keys(
    sums: Gradients, keys: slice, v: Float[Array, "C H"], p: Float[Array, "C q"], queries: Queries
) -> Float[Array, "H q"]:
    """Add what some keys of the block take from the queries, and return what they give to dQ^T."""
    dtype = v.dtype
    ds = (p * (_product(v, queries.dout, 1, 0) - queries.delta)).astype(dtype)
    sums.dv[:, keys] += _product(queries.dout, p.astype(dtype), 1, 1)
    sums.dk[:, keys] += _product(queries.q, ds, 1, 1)
    return _product(sums.k[:, keys], ds, 1, 0)


def _product(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), ((), ())), preferred_element_type=jnp.float32
    )
