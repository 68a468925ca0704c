"""Measure a whole `FlaxAttention`, its parts, and a bound from the parts' times.

    bound = attention alone + matmuls alone + 1.15 x bytes / 4 TB/s

The bytes are those that the elementwise operations must move if they read and write each array
once. [T, C] is the size of an array of tokens in the compute dtype, with C = N H channels:

    forward    norm and RoPE read and write q and k: 4 [T, C]; for each of q and k they read the
               tables of cosines and sines
    backward   norm and RoPE read q and dq and write dq, and likewise for k: 6 [T, C]; the bias
               gradients read dv and dy: 2 [T, C]; the tables are read again
    both       if parameters have another dtype: casts read and write the weights, or their
               gradients

Biases, and the sum of the three gradients of x, count as parts of the matmuls. A copy reaches
4 TB/s on an H200. Attention and matmuls are also measured in one program, in the module's order,
since a chip's clock depends on earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from maxattn._attention import attention
from maxattn.context_parallel.ring.hops import tie_transfer_to_kernel
from maxattn.measuring.passes import normal, with_gradient
from maxattn.measuring.timing import measure
from maxattn.modules import FlaxAttention
from maxattn.rope import Rotary, rope_1d
from maxattn.target import Target
from maxattn.tools.bench.kernels import config_of, inputs_of
from maxattn.tools.bench.row import BOTH, FORWARD, BenchJob, BenchRow, row_of
from maxattn.tools.model_shapes import Shape

MEMORY, SLACK = 4e12, 1.15  # bytes/s; factor of the bytes' time in the bound
Weights = tuple[Array, Array, Array, Array]


def bench_module(
    shape: Shape,
    kernel: str = "auto",
    param_dtype: str = "float32",
    budget: float = 0.5,
    options: Mapping[str, Any] | None = None,
    alone: bool = False,
) -> list[BenchRow]:
    """Measure a module with N H channels, forward and in training; unless `alone`, its parts."""
    jobs = _module(shape, kernel, param_dtype)
    if not alone:
        jobs += _attention(shape, kernel) + _matmuls(shape) + _both(shape, kernel)
    timed = measure([job.work for job in jobs], budget, options)
    rows = [row_of(job, t) for job, t in zip(jobs, timed, strict=True)]
    if alone:
        return rows
    bounds = [_bound(shape, rows, i, param_dtype) for i in (0, 1)]
    module = [replace(r, bound=b if r.ms else None) for r, b in zip(rows[:2], bounds, strict=True)]
    return module + rows[2:]


def elementwise_bytes(shape: Shape, training: bool, param_dtype: str = "float32") -> int:
    """Return the bytes that the elementwise parts must move, each array read and written once."""
    item, kept = jnp.dtype(shape.dtype).itemsize, jnp.dtype(param_dtype).itemsize
    width = shape.heads * shape.head_dim
    array = shape.batch * shape.q_len * width * item
    tables = 2 * 2 * shape.q_len * shape.head_dim // 2 * 4
    casts = 4 * width**2 * (item + kept) if kept != item else 0
    forward = 4 * array + tables + casts
    return forward + (8 * array + tables + casts if training else 0)


def _bound(shape: Shape, rows: list[BenchRow], which: int, param_dtype: str) -> float | None:
    """Return the bound in ms, for forward (0) or training (1); None if a part failed."""
    parts = [rows[2 + which].ms, rows[4 + which].ms]
    if not all(parts):
        return None
    return sum(parts) + 1e3 * SLACK * elementwise_bytes(shape, bool(which), param_dtype) / MEMORY


# ---- what is measured ----------------------------------------------------------------------------


def _module(shape: Shape, kernel: str, param_dtype: str) -> list[BenchJob]:
    width, dtype = shape.heads * shape.head_dim, jnp.dtype(shape.dtype)
    how: dict[str, Any] = {"bias": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6}
    how |= {"dtype": dtype, "param_dtype": jnp.dtype(param_dtype), "rngs": nnx.Rngs(0)}
    sizes = width, shape.heads, None, shape.head_dim
    graph, state = nnx.split(FlaxAttention(*sizes, config=config_of(kernel), **how))
    rotary = jax.tree.map(jnp.asarray, rope_1d(shape.head_dim, shape.q_len))

    def forward(x: Array, state: Any, rotary: Rotary) -> Array:
        return nnx.merge(graph, state)(x, rotary_emb=rotary, mask=shape.mask)

    def training(x: Array, state: Any, rotary: Rotary, dy: Array) -> Any:
        y, gradients = jax.vjp(lambda x, state: forward(x, state, rotary), x, state)
        return y, gradients(dy)

    x, dy = _arrays((shape.batch, shape.q_len, width), dtype, 2)
    return _jobs(shape, "module", (forward, (x, state, rotary)), (training, (x, state, rotary, dy)))


def _attention(shape: Shape, kernel: str) -> list[BenchJob]:
    config = config_of(kernel)
    inputs = inputs_of(shape, Target.here())[0]

    def forward(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, shape.mask, config=config)

    return _jobs(shape, "its attention", (forward, inputs[:3]), (with_gradient(forward), inputs))


def _matmuls(shape: Shape) -> list[BenchJob]:
    """Return jobs for the four matmuls alone; training adds two for each."""
    width, dtype = shape.heads * shape.head_dim, jnp.dtype(shape.dtype)
    x, o, *grads = _arrays((shape.batch * shape.q_len, width), dtype, 6)
    weights = tuple(_arrays((width, width), dtype, 4))

    def forward(x: Array, o: Array, weights: Weights) -> Any:
        return [x @ w for w in weights[:3]], o @ weights[3]

    def training(x: Array, o: Array, weights: Weights, grads: Any) -> Any:
        *of_x, dy = grads
        dx = _added([g @ w.T for g, w in zip(of_x, weights[:3], strict=True)])
        return forward(x, o, weights), dx, dy @ weights[3].T, [x.T @ g for g in of_x], o.T @ dy

    passes = (forward, (x, o, weights)), (training, (x, o, weights, grads))
    return _jobs(shape, "its matmuls", *passes)


def _added(products: list[Array]) -> Array:
    return products[2] + (products[1] + products[0])  # an order that cuBLASLt can fuse


def _both(shape: Shape, kernel: str) -> list[BenchJob]:
    """Return jobs for matmuls and attention in one program: no norms, RoPE or biases."""
    config, tokens = config_of(kernel), (shape.batch * shape.q_len, shape.heads * shape.head_dim)
    q, k, v = inputs_of(replace(shape, kv_heads=0), Target.here())[0][:3]
    x, dy = _arrays(tokens, q.dtype, 2)
    weights = tuple(_arrays((tokens[1], tokens[1]), q.dtype, 4))

    def attend(q: Array, k: Array, v: Array) -> Array:
        return attention(q, k, v, shape.mask, config=config).reshape(tokens)

    def forward(x: Array, weights: Weights, q: Array, k: Array, v: Array) -> Any:
        products, (q, k, v) = tie_transfer_to_kernel([x @ w for w in weights[:3]], (q, k, v))
        return products, attend(q, k, v) @ weights[3]

    def training(x: Array, weights: Weights, q: Array, k: Array, v: Array, dy: Array) -> Any:
        products, (q, k, v) = tie_transfer_to_kernel([x @ w for w in weights[:3]], (q, k, v))
        o, pull = jax.vjp(attend, q, k, v)
        grads = [g.reshape(tokens) for g in pull(dy @ weights[3].T)]
        of_x = [g @ w.T for g, w in zip(grads, weights[:3], strict=True)]
        return products, o @ weights[3], _added(of_x), [x.T @ g for g in grads], o.T @ dy

    operands = x, weights, q, k, v
    passes = (forward, operands), (training, (*operands, dy))
    return _jobs(shape, "attention and matmuls in one", *passes)


def _jobs(
    shape: Shape, who: str, *passes: tuple[Callable[..., Any], tuple[Any, ...]]
) -> list[BenchJob]:
    def job(what: str, f: Callable[..., Any], inputs: tuple[Any, ...]) -> BenchJob:
        row = BenchRow(shape.name, who, what)
        return BenchJob(row, shape, f, lambda: [inputs], is_attention=False)

    return [job(what, *each) for what, each in zip((FORWARD, BOTH), passes, strict=True)]


def _arrays(dims: tuple[int, ...], dtype: Any, count: int) -> list[Array]:
    keys = jax.random.split(jax.random.key(len(dims)), count)
    return [normal(key, dims, dtype) for key in keys]
