"""Measure bias, norm and rotary embedding alone: each kernel that is here, and XLA's steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from maxattn.modules.norm_rope import NormRope, Tables, Vectors, decide, in_steps, on_shard
from maxattn.modules.row_kernel.work import RowWork
from maxattn.rope import rope_1d
from maxattn.target import Target
from maxattn.tools.bench.row import BOTH, FORWARD, BenchJob, BenchRow
from maxattn.tools.model_shapes import Shape
from maxattn.tools.random_inputs import normal


def decided(shape: Shape) -> NormRope:
    """Return how the measured module norms and rotates its queries here."""
    width = shape.heads * shape.head_dim
    x = jax.ShapeDtypeStruct((shape.batch, shape.q_len, width), jnp.dtype(shape.dtype))
    norm, rotary = nnx.RMSNorm(width, rngs=nnx.Rngs(0)), rope_1d(shape.head_dim, shape.q_len)
    sizes = shape.heads, shape.head_dim
    return decide(Target.here(), x, "rms_norm_across_heads", norm, rotary, *sizes)


def norm_rope_jobs(shape: Shape) -> list[BenchJob]:
    """Return each kernel that is here, forward and with gradients, and the same by XLA.

    Args:
        shape: of the attention; the queries are normed and rotated.
    """
    work = RowWork(shape.heads, shape.head_dim, "across", 1e-6, "interleaved")
    runs: dict[str, Callable[..., Array]] = {"xla": partial(in_steps, work)}
    if (how := decided(shape)).work is not None:
        runs["cute"] = partial(on_shard, how)
    return [job for name, run in runs.items() for job in _both(shape, name, run)]


def _both(shape: Shape, name: str, run: Callable[..., Array]) -> list[BenchJob]:
    x, dy, vectors, tables = _inputs(shape)

    def training(x: Array, vectors: Vectors, tables: Tables, dy: Array) -> Any:
        y, pull = jax.vjp(lambda x, vectors: run(x, vectors, tables), x, vectors)
        return y, pull(dy)

    passes = (FORWARD, run, (x, vectors, tables)), (BOTH, training, (x, vectors, tables, dy))
    return [_job(shape, f"norm and rotary, {name}", *each) for each in passes]


def _job(shape: Shape, who: str, what: str, f: Callable[..., Any], of: tuple[Any, ...]) -> BenchJob:
    return BenchJob(BenchRow(shape.name, who, what), shape, f, lambda: [of], count=False)


def _inputs(shape: Shape) -> tuple[Array, Array, Vectors, Tables]:
    dims = shape.batch, shape.q_len, shape.heads, shape.head_dim
    keys = jax.random.split(jax.random.key(shape.heads), 4)
    x, dy = (normal(key, dims, jnp.dtype(shape.dtype)) for key in keys[:2])
    bias, scale = (normal(key, dims[2:], jnp.float32) for key in keys[2:])
    rotary = rope_1d(shape.head_dim, shape.q_len)
    tables = tuple(jnp.asarray(a).reshape(1, shape.q_len, -1) for a in (rotary.cos, rotary.sin))
    return x, dy, {"bias": bias, "scale": 1 + 0.1 * scale}, tables
