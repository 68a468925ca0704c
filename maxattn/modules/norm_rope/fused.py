"""`norm_rotary`: bias, norm and rotary embedding in one kernel, over a mesh, with its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.modules.norm_rope import cute, triton
from maxattn.modules.norm_rope.row import NormRopeRow
from maxattn.modules.qk_norm import QKNorm, scale_of
from maxattn.rope import Rotary, apply_rotary

Vectors = dict[str, Float[Array, "#N H"]]
Tables = tuple[Array, ...]


class Work(NamedTuple):
    """Say what is done to each row, and by which kernel.

    Args:
        row: what is done.
        by: "triton", "cute", or "interpreted": Triton's as ordinary operations, on any device.
    """

    row: NormRopeRow
    by: str


def norm_rotary(
    row: NormRopeRow,
    x: Float[Array, "B T NH"],
    bias: Float[Array, " NH"] | None,
    norm: QKNorm | None,
    rotary: Rotary | None,
    mesh: Any = None,
    letters: str = "BTNH",
    by: str = "triton",
) -> Float[Array, "B T N H"]:
    """Add a bias, norm and rotate queries or keys, in one kernel.

    Args:
        row: from `fused_row`.
        x: the projection.
        bias: of the projection, where it is not in x yet.
        norm, rotary: as for `fused_row`.
        mesh, letters: as for `path_here`.
        by: the kernel, as in `Work`.
    """
    b, t, _ = x.shape
    shape = sharding.mesh_shape(mesh)
    vectors = vectors_of(row, bias, norm, summed=bool(shape))
    tables = () if rotary is None else tuple(table_of(a, t) for a in (rotary.cos, rotary.sin))
    specs = _specs(vectors, tables, shape, letters, b)
    run = partial(on_shard, Work(row.on_device(letters, shape), by))
    heads = jnp.reshape(x, (b, t, row.heads, row.head_dim))
    return sharding.over_shards(run, mesh, shape, specs, specs[0])(heads, vectors, tables)


def vectors_of(row: NormRopeRow, bias: Array | None, norm: QKNorm | None, summed: bool) -> Vectors:
    """Return bias and scale by heads, those that there are.

    Args:
        summed: whether their gradients are summed over devices: before they are rounded, so in
            float32.
    """
    vectors = {} if bias is None else {"bias": jnp.reshape(bias, (row.heads, row.head_dim))}
    if norm is not None and (scale := scale_of(norm)) is not None:
        vectors["scale"] = jnp.reshape(scale, (-1, row.head_dim))
    return {name: v.astype(jnp.float32) for name, v in vectors.items()} if summed else vectors


def _specs(
    vectors: Vectors, tables: Tables, shape: sharding.MeshShape, letters: str, batch: int
) -> tuple[Any, ...]:
    """Return the specs of the heads, the vectors and the tables."""

    def spec(letters: str) -> Any:
        return sharding.partition_spec(letters, shape)

    examples = ["B" if len(a) == batch else "1" for a in tables]
    of_tables = tuple(spec(one + letters[1] + "H") for one in examples)
    heads = {name: letters[2] if len(v) > 1 else "1" for name, v in vectors.items()}
    of_vectors = {name: spec(letter + "H") for name, letter in heads.items()}
    return spec(letters), of_vectors, of_tables


# ---- one device ----------------------------------------------------------------------------------


def on_shard(work: Work, x: Array, vectors: Vectors, tables: Tables) -> Array:
    """Norm and rotate the rows of one device: [B, T, N, H], tables [B or 1, T, H/2]."""
    # [B, T, N, H] -> [B T, N, H];  [B or 1, T, H/2] -> [L, H/2]
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    y: Any = _fused(work, x.reshape(-1, *x.shape[2:]), vectors, flat)
    return jnp.reshape(y, x.shape)


def _forward(work: Work, x: Array, vectors: Vectors, tables: Tables, keep: bool = False) -> Any:
    if work.by == "cute":
        return cute.forward(work.row, x, vectors, tables, keep)
    interpret = work.by == "interpreted"
    return triton.forward(work.row, x, vectors, tables, keep=keep, interpret=interpret)


def _backward(work: Work, dy: Array, kept: Any) -> tuple[Array, Vectors]:
    x, r, vectors, tables = kept
    if work.by == "cute":
        return cute.backward(work.row, dy, x, r, vectors, tables)
    interpret = work.by == "interpreted"
    return triton.backward(work.row, dy, x, r, vectors, tables, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(work: Work, x: Float[Array, "M N H"], vectors: Vectors, tables: Tables) -> Array:
    return _forward(work, x, vectors, tables)[0]


def _fused_fwd(work: Work, x: Array, vectors: Vectors, tables: Tables) -> Any:
    # In a scan over layers XLA merges the projection's matmul with the store of its result for the
    # backward, and runs it once more for the kernel (jax 0.11.2). Not over a barrier.
    x = jax.lax.optimization_barrier(x)
    y, r = _forward(work, x, vectors, tables, keep=True)
    return jax.lax.optimization_barrier(y), (x, r, vectors, tables)


def _fused_bwd(work: Work, kept: Any, dy: Array) -> tuple[Array, Vectors, Tables]:
    x, _, vectors, tables = kept
    dx, sums = _backward(work, dy, kept)
    # Hardly anybody learns the angles: XLA drops this where nobody does.
    _, pull = jax.vjp(lambda tables: in_steps(work.row, x, vectors, tables), tables)
    return dx, {name: _as_given(sums[name], vectors[name]) for name in vectors}, pull(dy)[0]


_fused.defvjp(_fused_fwd, _fused_bwd)


def in_steps(row: NormRopeRow, x: Array, vectors: Vectors, tables: Tables) -> Array:
    """Compute what the kernels compute, step by step."""
    z = jnp.asarray(x, jnp.float32) + vectors.get("bias", 0.0)
    if row.norm is not None:
        axes = (1, 2) if row.norm == "across" else 2
        r = jax.lax.rsqrt(jnp.mean(z * z, axes, keepdims=True) + row.eps)
        z = z * r * vectors.get("scale", 1.0)
    if row.style is None:
        return z.astype(x.dtype)
    cos, sin = tables
    rotated = apply_rotary(z.reshape(-1, len(cos), *x.shape[1:]), Rotary(cos, sin, row.style))
    return rotated.reshape(x.shape).astype(x.dtype)


def _as_given(total: Float[Array, "N H"], v: Array) -> Array:
    """Return the gradient of a vector in its shape and dtype: over all heads that share it."""
    return (total if len(v) > 1 else total.sum(0, keepdims=True)).astype(v.dtype)


def table_of(a: Any, length: int) -> Float[Array, "B T H/2"]:
    return jnp.asarray(a, jnp.float32).reshape(-1, length, a.shape[-1])
