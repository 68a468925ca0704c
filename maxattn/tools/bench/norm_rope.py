"""Measure bias, norm and rotary embedding alone: each kernel that is here, and XLA's steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.modules.norm_rope import NormRopeRow
from maxattn.modules.norm_rope.fused import Tables, Vectors, Work, in_steps, on_shard
from maxattn.modules.norm_rope.path import kernels_here
from maxattn.rope import rope_1d
from maxattn.tools.bench.row import BOTH, FORWARD, BenchJob, BenchRow
from maxattn.tools.model_shapes import Shape
from maxattn.tools.random_inputs import normal


def row_of_shape(shape: Shape) -> NormRopeRow:
    """Return what the measured module does to its queries."""
    return NormRopeRow(shape.heads, shape.head_dim, "across", 1e-6, "interleaved")


def norm_rope_jobs(shape: Shape) -> list[BenchJob]:
    """Return each kernel that is here, forward and with gradients, and the same by XLA.

    Args:
        shape: of the attention; the queries are normed and rotated.
    """
    row = row_of_shape(shape)
    runs: dict[str, Callable[..., Array]] = {"xla": partial(_steps, row)}
    runs |= {name: partial(on_shard, Work(row, name)) for name in kernels_here(row, shape.dtype)}
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


def _steps(row: NormRopeRow, x: Array, vectors: Vectors, tables: Tables) -> Array:
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    return in_steps(row, x.reshape(-1, *x.shape[2:]), vectors, flat).reshape(x.shape)


def _inputs(shape: Shape) -> tuple[Array, Array, Vectors, Tables]:
    dims = shape.batch, shape.q_len, shape.heads, shape.head_dim
    keys = jax.random.split(jax.random.key(shape.heads), 4)
    x, dy = (normal(key, dims, jnp.dtype(shape.dtype)) for key in keys[:2])
    bias, scale = (normal(key, dims[2:], jnp.float32) for key in keys[2:])
    rotary = rope_1d(shape.head_dim, shape.q_len)
    tables = tuple(jnp.asarray(a).reshape(1, shape.q_len, -1) for a in (rotary.cos, rotary.sin))
    return x, dy, {"bias": bias, "scale": 1 + 0.1 * scale}, tables
