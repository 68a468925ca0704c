"""The level of an additive bias: a number per query that is subtracted, so that scores stay exact.

If all allowed keys of a query have a bias of -1e9, as in a batch row that is all padding, the
query's scores are lost in float32 beside -1e9, and its softmax would be uniform.

    softmax(s + b) = softmax(s + (b - level))        LSE(s + b) = LSE(s + (b - level)) + level

The level is the largest bias among the keys that the query may see, so that the LSE without the
level is as small as the scores. Kernels get bias and level, and subtract in float32: the bias keeps
its dtype. GPU libraries get the bias after the subtraction (kernels/fused/biased.py).
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn.masks import Mask

LARGE = 2.0**7
"""Biases from -`LARGE` to `LARGE` have level 0; beside them float32 resolves scores to 2**-17."""
PAIRS_AT_ONCE = 2**24
"""The most (query, key) pairs in a chunk of queries, unless the bias itself is larger."""

Level = Float[Array, "#B #N #T 1"]


def bias_level(
    bias: Float[Array, "#B #N #T #S"], mask: Mask, q_len: int, q_offset: Any = 0
) -> Level:
    """Return the largest finite bias of each query's allowed keys, or 0 if its size is small.

    Args:
        bias: the bias; T is `q_len` or 1, and S is the number of keys or 1.
        mask: the bound mask of these queries and keys.
        q_len: number of queries; the result has T = 1 if neither bias nor mask differ by query.
        q_offset: position of the first query; may be traced; default 0.
    """
    if bias.shape[3] == 1:  # all keys have the same bias, whichever are allowed
        return _where_large(bias.astype(jnp.float32))
    top = partial(_top, bias, mask, q_offset)
    *heads, rows, _ = level_shape(bias.shape, mask, q_len)
    at_once = max(1, max(PAIRS_AT_ONCE, bias.size) // (prod(heads) * bias.shape[3]))
    return _where_large(top(0, rows) if rows <= at_once else _in_chunks(top, rows, at_once))


def level_shape(bias: tuple[int, ...], mask: Mask, q_len: int) -> tuple[int, ...]:
    """Return the shape of a bias's level: 1 along axes on which neither bias nor mask varies."""
    if bias[3] == 1:
        return bias
    pair = np.arange(2)
    seen = jax.eval_shape(lambda mask: mask.allowed(pair, pair), mask).shape
    rows = q_len if max(seen[2], bias[2]) > 1 else 1
    return max(seen[0], bias[0]), max(seen[1], bias[1]), rows, 1


def _top(bias: Array, mask: Mask, q_offset: Any, start: Any, size: int) -> Level:
    """Return the largest finite bias of the allowed keys, or -inf, for each of `size` queries."""
    if bias.shape[2] > 1:
        bias = jax.lax.dynamic_slice_in_dim(bias, start, size, 2)
    x = bias.astype(jnp.float32)
    allowed = mask.allowed(start + jnp.arange(size), jnp.arange(x.shape[3]), q_offset)
    return jnp.where(allowed & jnp.isfinite(x), x, -jnp.inf).max(3, keepdims=True)


def _in_chunks(top: Any, rows: int, size: int) -> Level:
    """Call `top(start, size)` for each chunk of queries, and for the shorter last chunk."""
    chunks = jax.lax.map(lambda i: top(i * size, size), jnp.arange(rows // size))
    # [chunks, B, N, size, 1] -> [B, N, T, 1]
    whole = jnp.moveaxis(chunks, 0, 2).reshape(*chunks.shape[1:3], -1, 1)
    left = rows % size
    return jnp.concatenate([whole, top(rows - left, left)], axis=2) if left else whole


def _where_large(top: Level) -> Level:
    return jnp.where(jnp.isfinite(top) & (jnp.abs(top) > LARGE), top, 0.0)
