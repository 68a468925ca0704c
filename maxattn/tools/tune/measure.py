"""Time one kernel on one device: the local call, without the transfers around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from maxattn.call import Call
from maxattn.kernels.base import Inputs, Kernel, Rows
from maxattn.tools.random_inputs import normal

RUNS = 10
SECONDS = 3.0  # a candidate is timed this long at most, and twice at least


def milliseconds(kernel: Kernel, call: Call, training: bool) -> float:
    """Return the median time of a call.

    Args:
        kernel: built with the sizes to time.
        call: the local call; its mask holds no arrays.
        training: forward and backward; else forward alone.
    """
    function, operands = _program(kernel, call, training)
    compiled = jax.jit(function).lower(*operands).compile()
    jax.block_until_ready(compiled(*operands))
    times: list[float] = []
    while len(times) < 2 or (len(times) < RUNS and sum(times) < SECONDS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append(time.perf_counter() - started)
    return 1e3 * median(times)


def _program(
    kernel: Kernel, call: Call, training: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    keys = jax.random.split(jax.random.key(0), 4)
    q_shape = (call.batch, call.q_len, call.heads, call.head_dim)
    k_shape = (call.batch, call.kv_len, call.kv_heads, call.head_dim)
    shapes = (q_shape, k_shape, (*k_shape[:3], call.value_dim), (*q_shape[:3], call.value_dim))
    operands = tuple(
        normal(key, shape, call.dtype) for key, shape in zip(keys, shapes, strict=True)
    )

    def forward(q: Any, k: Any, v: Any) -> Any:
        return kernel.for_inference().forward(Inputs(q, k, v, mask=call.mask)).out

    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        inputs = Inputs(q, k, v, mask=call.mask)
        out, lse = kernel.forward(inputs)
        return out, kernel.backward(inputs, Rows(out, lse, dout, jnp.zeros_like(lse)))[:3]

    return (step, operands) if training else (forward, operands[:3])
