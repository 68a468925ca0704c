"""A kernel's forward and backward as functions of arrays, and random arrays to time them with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Inputs, Kernel, Rows


def forward(kernel: Kernel, *arrays: Any) -> Any:
    """Return (out, LSE) for the arrays (q, k, v, dout, mask); dout is not read."""
    q, k, v, _, mask = arrays
    return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))


def backward(kernel: Kernel, *arrays: Any) -> Any:
    """Return dq, dk, dv in their inputs' dtypes; arrays are (q, k, v, dout, mask, out, LSE)."""
    q, k, v, dout, mask, out, lse = arrays
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs f and its VJP; the function's last operand is the cotangent."""

    def both(*operands: Any) -> Any:
        *inputs, cotangent = operands
        out, pull_back = jax.vjp(f, *inputs)
        return out, pull_back(cotangent)

    return both


def random_inputs(call: Call, count: int) -> list[tuple[Array, ...]]:
    """Draw `count` sets of (q, k, v, dout), so that no two calls in a program are the same."""
    q = (call.batch, call.q_len, call.heads, call.head_dim)
    k, v = ((call.batch, call.kv_len, call.kv_heads, d) for d in (call.head_dim, call.value_dim))
    dims = (q, k, v, (*q[:3], call.value_dim))
    draw = jax.jit(partial(normal, dtype=call.dtype), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), (count, len(dims)))
    return [tuple(draw(key, each) for key, each in zip(row, dims, strict=True)) for row in keys]


def normal(key: Array, dims: tuple[int, ...], dtype: Any) -> Array:
    """Draw from a normal distribution in float32, and round to the dtype.

    In bfloat16 `jax.random.normal` has only 128 different values, none above 2.9. A GPU at its
    power limit may multiply such values up to 3% faster than a model's.
    """
    return jax.random.normal(key, dims, jnp.float32).astype(dtype)
