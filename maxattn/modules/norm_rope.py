"""Norm and rotary embedding of queries or keys together, in one kernel on NVIDIA GPUs.

Elsewhere `maxattn.modules.qk_norm` and `maxattn.rope` do the same, one after the other. The kernel
adds the projection's bias too, and stays in float32 from there to the result; the others round to
the compute dtype in between.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.jax_private.mesh import ambient_mesh, axis_names_of_type
from maxattn.jax_private.triton import triton_there
from maxattn.jax_private.varying import checked_axes
from maxattn.modules import norm_rope_triton
from maxattn.modules.norm_rope_row import NormRopeRow
from maxattn.modules.qk_norm import QKNorm
from maxattn.rope import Rotary, apply_rotary
from maxattn.target import Target

DTYPES = ("bfloat16", "float16", "float32")
KINDS = {None: None, "rms_norm": "head", "rms_norm_across_heads": "across"}
Vectors = dict[str, Float[Array, "#N H"]]
Tables = tuple[Array, ...]


def fused_row(
    qk_norm: str | None, norm: QKNorm | None, rotary: Rotary | None, heads: int, head_dim: int
) -> NormRopeRow | None:
    """Describe what the kernel does to a token's row, or return None where it cannot.

    Args:
        qk_norm: the kind of the norm; the kernel takes RMS norms and None.
        norm: of the queries or keys.
        rotary: its table, checked against the heads.
        heads: N.
        head_dim: H; the kernel takes powers of two.
    """
    nothing = norm is None and rotary is None
    plain = type(norm) in (nnx.RMSNorm, type(None))  # a class made of RMSNorm may do something else
    if nothing or not plain or qk_norm not in KINDS:
        return None
    kind, eps = (None, 0.0) if norm is None else (KINDS[qk_norm], norm.epsilon)
    row = NormRopeRow(heads, head_dim, kind, eps, None if rotary is None else rotary.style)
    return row if row.fits() else None


def runs_here(row: NormRopeRow, x: Float[Array, "B T C"], mesh: Any, letters: str = "BTNH") -> bool:
    """Say whether the kernel takes such rows here.

    It does on NVIDIA GPUs, where each device has whole rows, all equally many.

    Args:
        row: from `fused_row`.
        x: what is projected to the rows.
        mesh: the module's.
        letters: of the result's axes.
    """
    if not _on_nvidia() or x.dtype.name not in DTYPES:
        return False
    if _checked() or (mesh is None and _may_be_spread()):
        return False
    shape = sharding.mesh_shape(mesh)
    if row.norm == "across" and sharding.ways("N", shape) > 1:
        return False
    sizes = zip(letters, (*x.shape[:2], row.heads), strict=False)
    even = all(n % sharding.ways(letter, shape) == 0 for letter, n in sizes)
    return even and _local(row, letters, shape).fits()


def norm_rotary(
    row: NormRopeRow,
    x: Float[Array, "B T NH"],
    bias: Float[Array, " NH"] | None,
    norm: QKNorm | None,
    rotary: Rotary | None,
    mesh: Any = None,
    letters: str = "BTNH",
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Add a bias, norm and rotate queries or keys, in one kernel.

    Args:
        row: from `fused_row`.
        x: the projection.
        bias: of the projection, where it is not in x yet.
        norm, rotary: as for `fused_row`.
        mesh, letters: as for `runs_here`.
        interpret: run the kernel as ordinary operations, on any device.
    """
    b, t, _ = x.shape
    shape = sharding.mesh_shape(mesh)
    vectors = _vectors(row, bias, norm, summed=bool(shape))
    tables = () if rotary is None else tuple(_table(a, t) for a in (rotary.cos, rotary.sin))
    specs = _specs(vectors, tables, shape, letters, b)
    run = partial(_on_shard, _local(row, letters, shape), interpret)
    heads = jnp.reshape(x, (b, t, row.heads, row.head_dim))
    return sharding.over_shards(run, mesh, shape, specs, specs[0])(heads, vectors, tables)


def _vectors(row: NormRopeRow, bias: Array | None, norm: QKNorm | None, summed: bool) -> Vectors:
    """Return bias and scale by heads, those that there are.

    Args:
        summed: whether their gradients are summed over devices: before they are rounded, so in
            float32.
    """
    vectors = {} if bias is None else {"bias": jnp.reshape(bias, (row.heads, row.head_dim))}
    if norm is not None and norm.scale is not None:
        vectors["scale"] = jnp.reshape(norm.scale.get_value(), (-1, row.head_dim))
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


def _on_shard(
    row: NormRopeRow, interpret: bool, x: Array, vectors: Vectors, tables: Tables
) -> Array:
    # [B, T, N, H] -> [B T, N, H];  [B or 1, T, H/2] -> [L, H/2]
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    y: Any = _fused(row, interpret, x.reshape(-1, *x.shape[2:]), vectors, flat)
    return jnp.reshape(y, x.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    row: NormRopeRow, interpret: bool, x: Float[Array, "M N H"], vectors: Vectors, tables: Tables
) -> Array:
    return norm_rope_triton.forward(row, x, vectors, tables, interpret=interpret)[0]


def _fused_fwd(
    row: NormRopeRow, interpret: bool, x: Array, vectors: Vectors, tables: Tables
) -> Any:
    # In a scan over layers XLA merges the projection's matmul with the store of its result for the
    # backward, and runs it once more for the kernel (jax 0.11.2). Not over a barrier.
    x = jax.lax.optimization_barrier(x)
    y, r = norm_rope_triton.forward(row, x, vectors, tables, keep=True, interpret=interpret)
    return jax.lax.optimization_barrier(y), (x, r, vectors, tables)


def _fused_bwd(
    row: NormRopeRow, interpret: bool, kept: Any, dy: Array
) -> tuple[Array, Vectors, Tables]:
    x, r, vectors, tables = kept
    dx, sums = norm_rope_triton.backward(row, dy, x, r, vectors, tables, interpret)
    # Hardly anybody learns the angles: XLA drops this where nobody does.
    _, pull = jax.vjp(lambda tables: _in_steps(row, x, vectors, tables), tables)
    return dx, {name: _as_given(sums[name], vectors[name]) for name in vectors}, pull(dy)[0]


_fused.defvjp(_fused_fwd, _fused_bwd)


def _in_steps(row: NormRopeRow, x: Array, vectors: Vectors, tables: Tables) -> Array:
    """Compute what the kernel computes, step by step."""
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


# ---- shapes, and where the kernel may run --------------------------------------------------------


def _as_given(total: Float[Array, "N H"], v: Array) -> Array:
    """Return the gradient of a vector in its shape and dtype: over all heads that share it."""
    return (total if len(v) > 1 else total.sum(0, keepdims=True)).astype(v.dtype)


def _table(a: Any, length: int) -> Float[Array, "B T H/2"]:
    return jnp.asarray(a, jnp.float32).reshape(-1, length, a.shape[-1])


def _local(row: NormRopeRow, letters: str, shape: sharding.MeshShape) -> NormRopeRow:
    """Return what is done to the part of a row that a device has."""
    return replace(row, heads=row.heads // sharding.ways(letters[2], shape))


def _on_nvidia() -> bool:
    return Target.here().device.vendor == "NVIDIA" and triton_there()


def _may_be_spread() -> bool:
    """Say whether jax may lay out arrays over devices that nobody names.

    It would gather what the kernel reads.
    """
    ambient = ambient_mesh()
    if ambient is None:
        return _devices() > 1
    kinds = AxisType.Auto, AxisType.Explicit
    left = frozenset[str]().union(*(axis_names_of_type(ambient, kind) for kind in kinds))
    return any(ambient.shape[a] > 1 for a in left)


def _devices() -> int:
    return jax.device_count()


def _checked() -> bool:
    """Say whether a surrounding `shard_map` checks what varies: the kernel does not say so."""
    ambient = ambient_mesh()
    return ambient is not None and bool(checked_axes(axis_names_of_type(ambient, AxisType.Manual)))
