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
from maxattn.bench.timing import Timed, measure
from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, DotProduct
from maxattn.masks import Dense
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


def bench(
    shape: Shape, kernels: Sequence[str] = (), peers: bool = False, target: Target | None = None, budget: float = 0.5
) -> list[Row]:
    """Measure kernels of this library through their own forward and backward, and `auto` through `attention`.

    Args:
        shape: from `maxattn.shapes`.
        kernels: names, and "auto"; default every kernel that can run here, and auto.
        peers: other libraries too, called as their own documentation says; full masks alone.
        target: default this machine.
        budget: seconds for one measurement, about.
    """
    target = target or Target.here()
    inputs = _inputs(shape, target)
    jobs = _jobs(shape, tuple(kernels), peers, target, inputs)
    reference = (_reference(shape), lambda: [tuple(x[:1] for x in inputs[0][:3])])
    wanted, *times = measure([reference, *((job.f, job.make) for job in jobs if not job.row.note)], budget)
    following = iter(times)
    return [job.row if job.row.note else _row(job, next(following), wanted) for job in jobs]


@dataclass(frozen=True)
class _Job:
    """Hold one function to measure, and the row it fills; a note in it says that there is nothing to measure."""

    row: Row
    shape: Shape
    f: Callable[..., Any] = print
    make: Callable[[], list[tuple[Any, ...]]] = list


def _jobs(
    shape: Shape, kernels: tuple[str, ...], peers: bool, target: Target, inputs: list[tuple[Array, ...]]
) -> list[_Job]:
    jobs = []
    for name in kernels or (*KERNELS, "auto"):
        if name == "auto":
            jobs += _both(shape, "auto", _auto(shape), inputs)
            continue
        reason = refusal(name, shape.call(), target)
        if reason is None and (kernels or not _too_large(name, shape)):
            jobs += _of_kernel(name, shape, target, inputs)
        elif reason is not None and kernels:
            jobs.append(_Job(Row(shape.name, name, FORWARD, note=reason.rule), shape))
    if peers and shape.mask.is_full:
        for name, make in PEERS.items():
            try:
                jobs += _both(shape, f"bare {name}", make(), inputs)
            except ImportError as missing:
                jobs.append(_Job(Row(shape.name, f"bare {name}", FORWARD, note=str(missing)), shape))
    return jobs


# ---- what is measured ------------------------------------------------------------------------------------------------


def _of_kernel(name: str, shape: Shape, target: Target, inputs: list[tuple[Array, ...]]) -> list[_Job]:
    """Return a kernel's forward, and its backward from a given output and LSE."""
    kernel = KERNELS[name].build(shape.call(), AttentionConfig(), target)
    mask = shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)

    def forward(q: Array, k: Array, v: Array, dout: Array) -> Any:
        return kernel.forward(q, k, v, None, mask, 0, 0)

    def backward(q: Array, k: Array, v: Array, dout: Array, out: Array, lse: Array) -> Any:
        dq, dk, dv, _ = kernel.backward(q, k, v, None, mask, 0, 0, out, lse, dout, jnp.zeros_like(lse))
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    def given() -> list[tuple[Array, ...]]:
        first = jax.jit(forward)
        return [(*each, *first(*each)) for each in inputs]

    row = Row(shape.name, name, FORWARD)
    return [_Job(row, shape, forward, lambda: inputs), _Job(replace(row, what=BACKWARD), shape, backward, given)]


def _both(shape: Shape, who: str, f: Callable[..., Any], inputs: list[tuple[Array, ...]]) -> list[_Job]:
    """Return a function's forward, and forward and backward together."""
    row = Row(shape.name, who, FORWARD)
    forward = _Job(row, shape, f, lambda: [each[:3] for each in inputs])
    return [forward, _Job(replace(row, what=BOTH), shape, _with_gradient(f), lambda: inputs)]


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
    """Leave out what nobody would run: dense scores of more than 30 GB, plain JAX for more than 2 TFLOP."""
    scores = shape.batch * shape.heads * shape.q_len * shape.kv_len
    return (name == "dot_product" and 4.0 * scores > 3e10) or (name == "memory_efficient" and _operations(shape) > 2e12)


# ---- what is said of it ----------------------------------------------------------------------------------------------


def _row(job: _Job, timed: Timed, wanted: Timed) -> Row:
    if not timed.seconds:
        return replace(job.row, note=timed.failed)
    rate = _operations(job.shape) * WORK[job.row.what] / timed.seconds / 1e12
    row = replace(job.row, ms=1e3 * timed.seconds, tflops=rate, peak=timed.peak)
    if job.row.what != FORWARD or wanted.first is None:
        return row
    out = timed.first[0] if isinstance(timed.first, tuple) else timed.first
    got = out[:1, : wanted.first.shape[1]].astype(jnp.float32)
    return replace(row, error=float(jnp.abs(got - wanted.first).max() / jnp.abs(wanted.first).max()))


def _operations(shape: Shape) -> float:
    pairs = shape.mask.bind(shape.q_len, shape.kv_len).allowed_pairs(shape.q_len, shape.kv_len)
    return 4.0 * shape.batch * shape.heads * shape.head_dim * pairs


def _reference(shape: Shape) -> Callable[..., Any]:
    """Return dense attention in float32 of the first queries of one batch row."""
    few = min(CHECKED_QUERIES, shape.q_len)
    allowed = shape.mask.bind(shape.q_len, shape.kv_len).allowed(np.arange(few), np.arange(shape.kv_len))
    mask = Dense(np.asarray(allowed)).bind(few, shape.kv_len)
    dense = DotProduct(shape.call().scale)

    def reference(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.astype(jnp.float32) for x in (q[:, :few], k, v))
        return dense.forward(q, k, v, None, mask, 0, 0)[0]

    return reference
