"""What is measured of a shape: a kernel's forward and backward, or a function and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from maxattn.config import AttentionConfig
from maxattn.errors import InputError, did_you_mean
from maxattn.kernels import KERNELS, build
from maxattn.target import Target
from maxattn.tools.bench.row import (
    BACKWARD,
    BOTH,
    FORWARD,
    BenchJob,
    BenchRow,
    operations,
    scores_bytes,
)
from maxattn.tools.model_shapes import Shape
from maxattn.tools.random_inputs import normal
from maxattn.tools.tune import kernel_times

MANY_SCORES = 4e8  # bytes, from which one call of dot_product is long enough to measure alone
TOO_MANY_SCORES = 3e10  # bytes, beyond which nobody would run dot_product
TOO_MUCH_WORK = 2e12  # operations, beyond which nobody would run plain JAX


def check_kernels(names: Sequence[str]) -> None:
    """Refuse names of no kernel.

    Raises:
        InputError: naming those that there are.
    """
    known = (*KERNELS, "auto")
    for name in names:
        if name not in known:
            remedy = did_you_mean(name, known) or "write one of them"
            raise InputError("kernel", name, f"the kernels are {', '.join(known)}", remedy)


def config_of(kernel: str, *overrides: str) -> AttentionConfig:
    """Return the config that asks for a kernel of `KERNELS`, or for auto."""
    words = [f"attention={kernel}"]
    if kernel == "memory_efficient":
        words = ["attention=dot_product", "use_memory_efficient_attention=true"]
    return AttentionConfig.from_overrides([*words, *overrides])


def of_kernel(
    name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]]
) -> list[BenchJob]:
    """Return a kernel's forward, and its backward from a given output and LSE."""
    kernel = build(name, shape.call(), AttentionConfig(), target)
    mask = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)
    if name == "dot_product" and scores_bytes(shape) > MANY_SCORES:
        inputs = inputs[:1]  # else the scores of several calls would be in memory together

    def forward(q: Array, k: Array, v: Array, dout: Array) -> Any:
        return kernel_times.forward(kernel, q, k, v, dout, mask)

    def backward(q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array) -> Any:
        return kernel_times.backward(kernel, q, k, v, dout, mask, out, lse)

    def with_outputs() -> list[tuple[Array, ...]]:
        first = jax.jit(forward)
        return [(*each, *first(*each)) for each in inputs]

    row = BenchRow(shape.name, name, FORWARD)
    back = BenchJob(replace(row, what=BACKWARD), shape, backward, with_outputs)
    return [BenchJob(row, shape, forward, lambda: inputs), back]


def both_ways(
    shape: Shape, who: str, f: Callable[..., Any], inputs: list[tuple[Array, ...]]
) -> list[BenchJob]:
    """Return a function's forward, and forward and backward together."""
    row = BenchRow(shape.name, who, FORWARD)
    forward = BenchJob(row, shape, f, lambda: [each[:3] for each in inputs])
    return [forward, BenchJob(replace(row, what=BOTH), shape, with_gradient(f), lambda: inputs)]


def with_gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of (q, k, v, dout) that computes the output and the gradients."""

    def both(q: Array, k: Array, v: Array, dout: Array) -> Any:
        out, gradients = jax.vjp(f, q, k, v)
        return out, gradients(dout)

    return both


def random_inputs(shape: Shape, target: Target) -> list[tuple[Array, ...]]:
    """Make random (q, k, v, dout): several of small shapes, so that calls in one program differ."""
    size = shape.batch * shape.q_len * shape.heads * shape.head_dim
    sets = 1 if size > 2e8 or target.platform == "cpu" else 2 if size > 6e7 else 8
    keys = jax.random.split(jax.random.key(0), (sets, 4))
    q = (shape.batch, shape.q_len, shape.heads, shape.head_dim)
    k = (shape.batch, shape.kv_len, shape.kv_heads or shape.heads, shape.head_dim)
    v, out = ((*each[:3], shape.value_dim or shape.head_dim) for each in (k, q))
    make = jax.jit(partial(normal, dtype=shape.dtype), static_argnums=1)
    dims = (q, k, v, out)
    return [tuple(make(key, each) for key, each in zip(row, dims, strict=True)) for row in keys]


def too_large(name: str, shape: Shape) -> bool:
    """Leave out what nobody would run: dense scores of many GB, plain JAX on long shapes."""
    if name == "dot_product":
        return scores_bytes(shape) > TOO_MANY_SCORES
    return name == "memory_efficient" and operations(shape) > TOO_MUCH_WORK
