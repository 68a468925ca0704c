"""A kernel's forward and backward as functions of arrays, and random arrays to time them."""

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
    """Return the output and the LSE of arrays (q, k, v, dout, mask); dout is not read."""
    q, k, v, _, mask = arrays
    return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))


def backward(kernel: Kernel, *arrays: Any) -> Any:
    """Return dq, dk and dv in the dtypes of q, k and v; arrays end with `forward`'s results."""
    q, k, v, dout, mask, out, lse = arrays
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs f and its gradient; its last operand is the cotangent."""

    def both(*operands: Any) -> Any:
        *inputs, cotangent = operands
        out, pull_back = jax.vjp(f, *inputs)
        return out, pull_back(cotangent)

    return both


def random_inputs(call: Call, count: int) -> list[tuple[Array, ...]]:
    """Draw (q, k, v, dout) of a call, `count` times, so that calls in one program differ."""
    q = (call.batch, call.q_len, call.heads, call.head_dim)
    k, v = ((call.batch, call.kv_len, call.kv_heads, d) for d in (call.head_dim, call.value_dim))
    dims = (q, k, v, (*q[:3], call.value_dim))
    draw = jax.jit(partial(normal, dtype=call.dtype), static_argnums=1)
    keys = jax.random.split(jax.random.key(0), (count, len(dims)))
    return [tuple(draw(key, each) for key, each in zip(row, dims, strict=True)) for row in keys]


def normal(key: Array, dims: tuple[int, ...], dtype: Any) -> Array:
    """Draw from a normal distribution with all bits of the dtype.

    `jax.random.normal` makes bfloat16 of seven random bits: 128 values, none beyond 2.9, unlike a
    model's numbers. A GPU under its power limit may multiply them up to 3% faster.
    """
    return jax.random.normal(key, dims, jnp.float32).astype(dtype)
