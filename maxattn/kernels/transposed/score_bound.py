"""Which blocks of queries need no running maximum: their scores are known to be small.

A score is at most |q| |k|. Where that bound is small, exp2 of every score is far from both ends of
float32's range, and

    out = sum(exp2(s) v) / sum(exp2(s))        lse = log2(sum(exp2(s)))

lose no digits: floating point keeps the same number of them at every magnitude. Queries and keys
that are normalised, as in most diffusion transformers, are always within it. Elsewhere the online
softmax runs; the choice is made for each head and block of queries.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Sums of 2**24 terms of 2**94 are below 2**118, and what is 2**-32 of a term of 2**-94 is still a
# normal number. The largest value moves both ends by its exponent.
LARGEST = 94.0
# Weights are rounded to the dtype of V, and those of float16 are normal from 2**-14 to 2**15.
LARGEST_FLOAT16 = 14.0


def small_scores(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    v: Float[Array, "K S H"],
    block_q: int,
) -> Int[Array, "1 N*T//block_q"]:
    """Return 1 for each head and block of queries whose scores are bounded, else 0.

    What is infinite or no number is not bounded.

    Args:
        q: queries, multiplied by the scale and by log2(e).
        k, v: keys and values of heads that N / K neighbouring query heads share.
        block_q: queries of a block, which divides T.
    """
    heads = q.shape[0]
    queries = _norms(q).reshape(heads, -1, block_q).max(axis=2)
    largest = jnp.abs(v).astype(jnp.float32).max(axis=(1, 2))
    most = LARGEST_FLOAT16 if v.dtype == jnp.float16 else LARGEST
    room = most - jnp.abs(jnp.log2(jnp.where(largest == 0, 1.0, largest)))
    keys, room = (jnp.repeat(x, heads // k.shape[0]) for x in (_norms(k).max(axis=1), room))
    return (queries * keys[:, None] <= room[:, None]).astype(jnp.int32).reshape(1, -1)


def _norms(x: Float[Array, "N T H"]) -> Float[Array, "N T"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axis=2))
