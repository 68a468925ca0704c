"""Measure kernels, and other libraries called bare, on one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.attention import attention
from maxattn.bench.peers import PEERS
from maxattn.bench.timing import seconds
from maxattn.config import AttentionConfig
from maxattn.errors import MaxattnError
from maxattn.kernels import KERNELS
from maxattn.kernels.auto import order
from maxattn.plan import refusal
from maxattn.shapes import Shape
from maxattn.target import Target

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # in units of 4 B N T S H operations
CHECKED_QUERIES = 256


@dataclass(frozen=True)
class Row:
    """Hold one measurement.

    Args:
        shape, who, what: name of the shape, the kernel or library, and "forward", "backward" or "forward+backward".
        ms: device time of one call; 0 where it failed.
        tflops: useful operations, of allowed pairs alone, in TFLOP/s.
        peak: bytes of arguments, results and temporaries, as the compiler reports them.
        error: largest difference from float32 of some outputs, relative to their largest entry.
        note: why there is no time.
    """

    shape: str
    who: str
    what: str
    ms: float = 0.0
    tflops: float = 0.0
    peak: int = 0
    error: float | None = None
    note: str = ""


def bench_shape(
    shape: Shape, kernels: Sequence[str] = (), target: Target | None = None, budget: float = 0.5
) -> list[Row]:
    """Measure kernels of this library through their own forward and backward, and `auto` through `attention`.

    Args:
        shape: from `maxattn.shapes`.
        kernels: names, and "auto"; default every kernel that can run here, and auto.
        target: default this machine.
        budget: seconds for one measurement, about.
    """
    target = target or Target.here()
    inputs = _inputs(shape, target)
    rows = []
    for name in kernels or (*KERNELS, "auto"):
        if name == "auto":
            rows += _timed(shape, "auto", {FORWARD: _auto(shape), BOTH: _with_gradient(_auto(shape))}, inputs, budget)
            continue
        reason = refusal(name, shape.call(), target)
        if reason is None and not _too_large(name, shape):
            rows += _timed(shape, name, _of_kernel(name, shape, target), inputs, budget)
        elif reason is not None and kernels:
            rows.append(Row(shape.name, name, FORWARD, note=reason.rule))
    return rows


def bench_peers(shape: Shape, budget: float = 0.5) -> list[Row]:
    """Measure the libraries that this machine has, called as their own documentation says; full masks alone."""
    if not shape.mask.is_full:
        return []
    inputs = _inputs(shape, Target.here())
    rows = []
    for name, make in PEERS.items():
        try:
            f = make()
        except ImportError as missing:
            rows.append(Row(shape.name, name, FORWARD, note=str(missing)))
            continue
        rows += _timed(shape, name, {FORWARD: f, BOTH: _with_gradient(f)}, inputs, budget)
    return rows


# ---- what is measured ------------------------------------------------------------------------------------------------


def _of_kernel(name: str, shape: Shape, target: Target) -> dict[str, Callable[..., Any]]:
    """Return a kernel's forward, and its backward from a given output and LSE."""
    kernel = KERNELS[name].build(shape.call(), AttentionConfig(), target)
    mask = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)

    def forward(q: Array, k: Array, v: Array, dout: Array) -> Any:
        return kernel.forward(q, k, v, None, mask, 0, 0)

    def backward(q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array) -> Any:
        dq, dk, dv, _ = kernel.backward(q, k, v, None, mask, 0, 0, out, lse, dout, jnp.zeros_like(lse))
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    return {FORWARD: forward, BACKWARD: backward}


def _auto(shape: Shape) -> Callable[..., Any]:
    return lambda q, k, v: attention(q, k, v, shape.mask, role=shape.role)


def _with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    def both(q: Array, k: Array, v: Array, dout: Array) -> Any:
        out, gradients = jax.vjp(f, q, k, v)
        return out, gradients(dout)

    return both


def _inputs(shape: Shape, target: Target) -> list[tuple[Array, ...]]:
    """Make random (q, k, v, dout): several of small shapes, so that calls in one program differ."""
    b, t, s, n, h = shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.head_dim
    size = b * t * n * h
    sets = 1 if size > 2e8 or target.platform == "cpu" else 2 if size > 6e7 else 8
    keys = jax.random.split(jax.random.key(0), (sets, 4))
    sizes = ((b, t, n, h), (b, s, shape.kv_heads or n, h), (b, s, shape.kv_heads or n, h), (b, t, n, h))
    make = jax.jit(lambda key, dims: jax.random.normal(key, dims, shape.dtype), static_argnums=1)
    return [tuple(make(key, dims) for key, dims in zip(row, sizes, strict=True)) for row in keys]


def _too_large(name: str, shape: Shape) -> bool:
    """Dense scores of more than 30 GB are not tried."""
    return name == "dot_product" and 4.0 * shape.batch * shape.heads * shape.q_len * shape.kv_len > 3e10


# ---- measuring -------------------------------------------------------------------------------------------------------


def _timed(
    shape: Shape, who: str, functions: dict[str, Callable[..., Any]], inputs: list[tuple[Array, ...]], budget: float
) -> list[Row]:
    rows = []
    for what, f in functions.items():
        row = Row(shape.name, who, what)
        try:
            given = _given(functions, what, inputs)
            row = replace(row, peak=_peak(f, given[0]))
            time = seconds(f, given, budget)
            row = replace(row, ms=1e3 * time, tflops=_operations(shape) * WORK[what] / time / 1e12)
            if what == FORWARD:
                row = replace(row, error=_error(shape, f, given[0]))
        except (MaxattnError, NotImplementedError, ValueError, RuntimeError, TypeError, AssertionError) as failed:
            row = replace(row, note=f"{type(failed).__name__}: {str(failed).strip().splitlines()[0][:160]}")
        rows.append(row)
    return rows


def _given(
    functions: dict[str, Callable[..., Any]], what: str, inputs: list[tuple[Array, ...]]
) -> list[tuple[Array, ...]]:
    """Return the arguments of a pass: a backward gets the forward's output and LSE as well."""
    if what == BACKWARD:
        forward = jax.jit(functions[FORWARD])
        return [(*each, *forward(*each)) for each in inputs]
    own = BACKWARD in functions or what == BOTH
    return inputs if own else [each[:3] for each in inputs]


def _operations(shape: Shape) -> float:
    pairs = shape.mask.bind(shape.q_len, shape.kv_len).allowed_pairs(shape.q_len, shape.kv_len)
    return 4.0 * shape.batch * shape.heads * shape.head_dim * pairs


def _peak(f: Callable[..., Any], args: tuple[Any, ...]) -> int:
    memory = jax.jit(f).lower(*args).compile().memory_analysis()
    if memory is None:
        return 0
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def _error(shape: Shape, f: Callable[..., Any], args: tuple[Array, ...]) -> float:
    """Compare the first queries of the first batch row with dense attention in float32."""
    q, k, v = (x[:1].astype(jnp.float32) for x in args[:3])
    few = min(CHECKED_QUERIES, shape.q_len)
    mask = shape.mask.bind(shape.q_len, shape.kv_len)
    allowed = mask.allowed(np.arange(few), np.arange(shape.kv_len))
    kernel = KERNELS["dot_product"].build(shape.call(), AttentionConfig(), Target.here())
    from maxattn.masks import Dense

    want = kernel.forward(q[:, :few], k, v, None, Dense(np.asarray(allowed)).bind(few, shape.kv_len), 0, 0)[0]
    got = jax.jit(f)(*args)
    got = got[0] if isinstance(got, tuple) else got
    return float(jnp.abs(got[:1, :few].astype(jnp.float32) - want).max() / jnp.abs(want).max())


def chosen(shape: Shape, target: Target) -> tuple[str, ...]:
    """Return the kernels that `auto` tries on a shape, in order."""
    return order(shape.call(), target)[0]
