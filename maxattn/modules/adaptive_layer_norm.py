"""The adaptive layer norm of diffusion transformers, with the gated sum before it.

On Hopper GPUs it is one kernel; elsewhere, and in gradients, XLA computes the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.config.numbers import whole
from maxattn.errors import InputError, brief
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import OCTET, RowLaunch, RowWork, VectorParts
from maxattn.target import Target

Tokens = Float[Array, "B T D"]
Parts = tuple[Float[Array, "#B #F R D"], ...]
Vectors = dict[str, tuple[VectorParts, Parts]]
DTYPES = ("bfloat16", "float16")
WIDE = ("float32", *DTYPES)


@partial(jax.tree_util.register_dataclass, data_fields=["table", "base"], meta_fields=["row"])
@dataclass(frozen=True)
class ModulationRow:
    """One row of a modulation table: table[:, :, row] + base[:, :, row].

    The kernel reads the row from the tables, without a copy.

    Args:
        table: [B or 1, F or 1, R, D]: R vectors for each of F frames; F divides T.
        row: which of the R vectors; default 0.
        base: added to the table, such as a block's learned vectors; default none.

    >>> ModulationRow(jnp.ones((1, 3, 6, 64)), 2, jnp.ones((1, 1, 6, 64))).value().shape
    (1, 3, 64)
    """

    table: Float[Array, "#B #F R D"]
    row: int = field(default=0)
    base: Float[Array, "#B #F R D"] | None = None

    def value(self) -> Float[Array, "#B #F D"]:
        """Return the row in float32."""
        return _sum_of_rows(self.parts, (self.row,) * len(self.parts))

    @property
    def parts(self) -> Parts:
        found = (self.table,) if self.base is None else (self.base, self.table)
        rule = "table and base must be [B, F, R, D], and row a static number from 0 to R - 1"
        for part in found:
            if part.ndim != 4 or whole(self.row, 0, part.shape[2] - 1) is None:
                value = f"row {brief(self.row)} of shape {tuple(part.shape)}"
                raise InputError("ModulationRow", value, rule, "give a row that each table has")
        return found


class GatedBranch(NamedTuple):
    """A layer's result, before it is added to the tokens: gate * (y + bias).

    Args:
        y: [B, T, D], of any dtype.
        gate: default 1.
        bias: [D], if the layer's last projection did not add it; default none.
    """

    y: Float[Array, "B T D"]
    gate: ModulationRow | None = None
    bias: Float[Array, " D"] | None = None


def adaptive_norm(
    x: Float[Array, "B T D"],
    norm: nnx.LayerNorm,
    scale: ModulationRow | None = None,
    shift: ModulationRow | None = None,
    *,
    branch: GatedBranch | None = None,
    mesh: Any = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"]]:
    """Add a layer's result to the tokens, and normalise the sum.

    x' = x + gate * (y + bias)
    y' = norm(x') * (1 + scale) + shift

    The arithmetic is float32; x' and y' are rounded once. On Hopper GPUs with fa4-jax, bfloat16 and
    float16 tokens use one kernel. When the call is differentiated, XLA computes the steps.

    Args:
        x: tokens, [B, T, D].
        norm: layer norm over D, with or without a learned scale and bias.
        scale, shift: the modulation's scale and shift; default none.
        branch: the layer's result, which is added first; default none.
        mesh: device mesh that the call is sharded over; default none.

    Returns:
        x' and y', in the dtype of x.

    Raises:
        InputError: if a vector or the branch has another width than x, if F does not divide T, or
            if a table does not have the row.

    >>> x, rows = jnp.ones((1, 12, 64)), jnp.zeros((1, 3, 2, 64))
    >>> norm = nnx.LayerNorm(64, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    >>> total, y = adaptive_norm(x, norm, ModulationRow(rows, 0), ModulationRow(rows, 1))
    >>> y.shape
    (1, 12, 64)
    """
    for name, row in (("scale", scale), ("shift", shift)):
        if not isinstance(row, ModulationRow | None):
            rule = "it must be a ModulationRow"
            raise InputError(name, row, rule, "write ModulationRow(rows, n)")
    vectors = _of_norm(norm, scale, shift) | _of_branch(branch)
    rows = (x,) if branch is None else (x, branch.y)
    _check(rows, vectors)
    named = tuple((name, vector) for name, (vector, _) in vectors.items())
    work = RowWork(x.shape[-1] // OCTET, OCTET, "layer", norm.epsilon, None, named)
    parts = tuple(part for _, each in vectors.values() for part in each)
    launch, shape = decide(Target.here(), work, rows, parts, mesh), sharding.mesh_shape(mesh)
    if launch is None:
        found = in_steps(work, rows, parts)
    else:
        letters = ("B..." if len(part) == len(x) else "1..." for part in parts)
        of_parts = tuple(sharding.partition_spec(each, shape) for each in letters)
        of_rows = sharding.partition_spec("BT.", shape)
        specs = ((of_rows,) * len(rows), of_parts)
        run = sharding.over_shards(partial(_fused, launch), mesh, shape, specs, of_rows)
        found = run(rows, parts)
    return (x if branch is None else found[1]), found[0]


def gated_sum(x: Tokens, branch: GatedBranch) -> Tokens:
    """Compute x + gate * (y + bias) in float32; keep the dtype of x.

    Raises:
        InputError: if the branch, or a vector of it, does not fit x.
    """
    _check((x, branch.y), _of_branch(branch))
    gate = None if branch.gate is None else _of_tokens(branch.gate.value(), x.shape[1])
    bias = None if branch.bias is None else branch.bias.astype(jnp.float32)
    return _gated(x, branch.y, gate, bias)


def _of_norm(
    norm: nnx.LayerNorm, scale: ModulationRow | None, shift: ModulationRow | None
) -> Vectors:
    """Combine the norm's learned scale and bias with the modulation's scale and shift."""
    found: Vectors = {} if scale is None else {"scale": _parts(scale, 1.0)}
    found |= {} if shift is None else {"shift": _parts(shift)}
    learned, offset = ((None if p is None else p[...]) for p in (norm.scale, norm.bias))
    if offset is not None:
        more = offset if scale is None else (1 + scale.value()) * offset
        found["shift"] = _whole(more if shift is None else more + shift.value())
    if learned is not None:
        found["scale"] = _whole(learned if scale is None else (1 + scale.value()) * learned)
    return found


def _of_branch(branch: GatedBranch | None) -> Vectors:
    gate, bias = (None, None) if branch is None else (branch.gate, branch.bias)
    found: Vectors = {} if gate is None else {"gate": _parts(gate)}
    return found if bias is None else found | {"bias": _whole(bias)}


def _parts(row: ModulationRow, constant: float = 0.0) -> tuple[VectorParts, Parts]:
    return VectorParts((row.row,) * len(row.parts), constant), row.parts


def _whole(vector: Float[Array, "*BF D"]) -> tuple[VectorParts, Parts]:
    """Shape a computed vector [D] or [B, F, D] as a table with R = 1."""
    shape = (1, 1, 1, vector.shape[-1]) if vector.ndim == 1 else (*vector.shape[:2], 1, -1)
    return VectorParts(), (jnp.reshape(vector, shape),)


def _check(rows: tuple[Tokens, ...], vectors: Vectors) -> None:
    x, *branch = rows
    b, t, d = x.shape
    for y in branch:
        if y.shape != x.shape:
            remedy = "pass a layer's result for the same tokens"
            rule = f"it must have the shape of x, {(b, t, d)}"
            raise InputError("branch", f"shape {tuple(y.shape)}", rule, remedy)
    for name, (_, parts) in vectors.items():
        for part in parts:
            batch, frames, _, width = part.shape
            if batch not in (1, b) or width != d or t % frames:
                rule = f"it must be [{b} or 1, F, R, {d}], and F must divide {t}"
                remedy = "pass a table or vector of this shape"
                raise InputError(name, f"shape {tuple(part.shape)}", rule, remedy)


# ---- the kernel ----------------------------------------------------------------------------------


def decide(
    target: Target, work: RowWork, rows: tuple[Tokens, ...], parts: Parts, mesh: Any
) -> RowLaunch | None:
    """Return the kernel's launch for x and the branch, or None if XLA computes the steps."""
    x, gpu, shape = rows[0], target.device, sharding.mesh_shape(mesh)
    if not gpu.is_a("hopper") or x.dtype.name not in DTYPES or not x.size or x.shape[-1] % OCTET:
        return None
    if any(a.dtype.name not in WIDE for a in (*rows, *parts)):
        return None
    # A thread block loads the vectors of one frame: tables with several frames must agree on F.
    frames = {part.shape[1] for part in parts} - {1}
    # Each device must have equally many tokens and, with several frames, all T of them.
    batches, spans = (sharding.ways(letter, shape) for letter in "BT")
    is_even = x.shape[0] % batches == 0 and x.shape[1] % spans == 0
    widths = tuple(each.dtype.itemsize for each in rows)
    launch = RowLaunch(work, widths, gpu.sms, gpu.family.shared_memory)
    is_even &= len(frames) <= 1 and not (frames and spans > 1)
    return launch if is_even and launch.fits() and not call.why_not(target, mesh) else None


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(launch: RowLaunch, rows: tuple[Tokens, ...], parts: Parts) -> tuple[Tokens, ...]:
    return tuple(call.norm_rows(launch, rows, parts, name="adaptive_norm"))


# The gradient needs the residuals of XLA's steps, which then compute the forward too.
_fused.defjvp(lambda launch, given, moved: jax.jvp(partial(in_steps, launch.work), given, moved))


# ---- XLA's steps ---------------------------------------------------------------------------------


def in_steps(work: RowWork, rows: tuple[Tokens, ...], parts: Parts) -> tuple[Tokens, ...]:
    """Compute the normalised tokens and, if there is a branch, the sum, with XLA."""
    x, *branch = rows
    # Row by row: else XLA writes the whole table for all tokens, and each layer reads all of it.
    vectors, left = {}, iter(parts)
    for name, vector in work.vectors:
        value = _sum_of_rows(tuple(islice(left, len(vector.rows))), vector.rows)
        value = value + vector.constant if vector.constant else value
        vectors[name] = _of_tokens(value, x.shape[1])
    for y in branch:
        x = _gated(x, y, vectors.get("gate"), vectors.get("bias"))
    z = x.astype(jnp.float32)
    z = z - jnp.mean(z, axis=-1, keepdims=True)
    n = z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + work.eps)
    n = n * vectors["scale"] if "scale" in vectors else n
    n = n + vectors["shift"] if "shift" in vectors else n
    return (n.astype(x.dtype), x) if branch else (n.astype(x.dtype),)


def _gated(x: Tokens, y: Tokens, gate: Array | None, bias: Array | None) -> Tokens:
    branch = y.astype(jnp.float32)
    branch = branch if bias is None else branch + bias
    branch = branch if gate is None else branch * gate
    return (x.astype(jnp.float32) + branch).astype(x.dtype)


def _sum_of_rows(parts: Parts, rows: tuple[int, ...]) -> Float[Array, "#B #F D"]:
    each = [part[:, :, row].astype(jnp.float32) for part, row in zip(parts, rows, strict=True)]
    return sum(each[1:], each[0])


def _of_tokens(vector: Float[Array, "#B #F D"], tokens: int) -> Float[Array, "#B #T D"]:
    """Repeat the vector of each frame for its tokens: [B, T, D], or [B, 1, D] if F is 1."""
    b, frames, d = vector.shape
    if frames == 1:
        return vector
    spread = (b, frames, tokens // frames, d)
    # [B, F, D] -> [B, F, T / F, D] -> [B, T, D]
    return jnp.broadcast_to(vector[:, :, None], spread).reshape(b, tokens, d)
