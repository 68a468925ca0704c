"""`adaptive_norm`: a branch is added, and the sum is normed, scaled and shifted, over a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.errors import InputError
from maxattn.modules.adaptive_layer_norm import cute
from maxattn.modules.adaptive_layer_norm.path import has_kernel
from maxattn.modules.adaptive_layer_norm.steps import (
    NormWork,
    Parts,
    Tokens,
    gated,
    in_steps,
    of_tokens,
)
from maxattn.modules.adaptive_layer_norm.vectors import ModulationRow, VectorParts

Vectors = dict[str, tuple[VectorParts, Parts]]


class GatedBranch(NamedTuple):
    """Hold what a layer adds to its tokens: gate * (y + bias).

    Args:
        y: [B, T, D], of any dtype.
        gate: default 1.
        bias: [D], of a projection that left it out; default none.
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
    """Add a branch to tokens, and norm the sum.

    x' = x + gate * (y + bias);   y' = norm(x') * (1 + scale) + shift

    All is float32 in between, and rounded where it is returned. On Hopper GPUs with fa4-jax, one
    kernel does it to bfloat16 and float16; its gradient is that of XLA's steps.

    Args:
        x: tokens, [B, T, D].
        norm: over D, with scale and bias of its own or without; its eps is used.
        scale, shift: of the modulation; default none.
        branch: what is added first; default nothing.
        mesh: devices to spread over; default none.

    Returns:
        x' and y', in the dtype of x.

    Raises:
        InputError: a vector or the branch has another width than x, or frames that do not divide T.

    >>> x, rows = jnp.ones((1, 12, 64)), jnp.zeros((1, 3, 2, 64))
    >>> norm = nnx.LayerNorm(64, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))
    >>> total, y = adaptive_norm(x, norm, ModulationRow(rows, 0), ModulationRow(rows, 1))
    >>> y.shape
    (1, 12, 64)
    """
    vectors = _of_norm(norm, scale, shift) | _of_branch(branch)
    rows = (x,) if branch is None else (x, branch.y)
    _check(rows, vectors)
    work = NormWork(norm.epsilon, tuple((name, vector) for name, (vector, _) in vectors.items()))
    parts = tuple(part for _, each in vectors.values() for part in each)
    found = _run(work, rows, parts, mesh)
    return (x if branch is None else found[1]), found[0]


def gated_sum(x: Tokens, branch: GatedBranch) -> Tokens:
    """Compute x + gate * (y + bias) in float32; keep the dtype of x.

    Args:
        x: tokens, [B, T, D].
        branch: what is added.
    """
    gate = None if branch.gate is None else of_tokens(branch.gate.value(), x.shape[1])
    bias = None if branch.bias is None else branch.bias.astype(jnp.float32)
    return gated(x, branch.y, gate, bias)


def _of_norm(
    norm: nnx.LayerNorm, scale: ModulationRow | None, shift: ModulationRow | None
) -> Vectors:
    """Return scale and shift: what the norm learned, or what modulates it, or both together."""
    found: Vectors = {}
    if scale is not None:
        found["scale"] = _parts(scale, 1.0)
    if shift is not None:
        found["shift"] = _parts(shift)
    learned, offset = ((None if p is None else p[...]) for p in (norm.scale, norm.bias))
    if offset is not None:
        more = offset if scale is None else (1 + scale.value()) * offset
        more = more if shift is None else more + shift.value()
        found["shift"] = _whole(more)
    if learned is not None:
        found["scale"] = _whole(learned if scale is None else (1 + scale.value()) * learned)
    return found


def _of_branch(branch: GatedBranch | None) -> Vectors:
    found: Vectors = {}
    if branch is not None and branch.gate is not None:
        found["gate"] = _parts(branch.gate)
    if branch is not None and branch.bias is not None:
        found["bias"] = _whole(branch.bias)
    return found


def _parts(row: ModulationRow, constant: float = 0.0) -> tuple[VectorParts, Parts]:
    parts = row.parts
    return VectorParts((row.row,) * len(parts), constant), parts


def _whole(vector: Float[Array, "*BF D"]) -> tuple[VectorParts, Parts]:
    """Take a vector as it is: [D] or [B, F, D]."""
    shape = (1, 1, 1, vector.shape[-1]) if vector.ndim == 1 else (*vector.shape[:2], 1, -1)
    return VectorParts((0,)), (jnp.reshape(vector, shape),)


def _check(rows: tuple[Tokens, ...], vectors: Vectors) -> None:
    x, *branch = rows
    b, t, d = x.shape
    for y in branch:
        if y.shape != x.shape:
            remedy = "pass what a layer gave for the same tokens"
            raise InputError("branch", f"shape {tuple(y.shape)}", f"x is {(b, t, d)}", remedy)
    for name, (_, parts) in vectors.items():
        for part in parts:
            batch, frames, _, width = part.shape
            if batch not in (1, b) or width != d or t % frames:
                rule = f"it is [{b} or 1, F, R, {d}], and F divides {t} tokens"
                raise InputError(name, f"shape {tuple(part.shape)}", rule, "pass a row of that")


# ---- one device ----------------------------------------------------------------------------------


def _run(work: NormWork, rows: tuple[Tokens, ...], parts: Parts, mesh: Any) -> tuple[Tokens, ...]:
    shape = sharding.mesh_shape(mesh)
    if not has_kernel(work, rows, parts, mesh):
        return in_steps(work, rows, parts)

    def spec(letters: str) -> Any:
        return sharding.partition_spec(letters, shape)

    b = rows[0].shape[0]
    of_parts = tuple(spec("B..." if len(part) == b else "1...") for part in parts)
    specs = (spec("BT."),) * len(rows), of_parts
    return sharding.over_shards(partial(_fused, work), mesh, shape, specs, specs[0])(rows, parts)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(work: NormWork, rows: tuple[Tokens, ...], parts: Parts) -> tuple[Tokens, ...]:
    launch = cute.launch_of(work.eps, rows, work.vectors)
    return tuple(cute.forward(launch, rows, parts))


def _fused_fwd(work: NormWork, rows: tuple[Tokens, ...], parts: Parts) -> Any:
    # A gradient needs what XLA's steps keep: they compute the forward too.
    return jax.vjp(partial(in_steps, work), rows, parts)


def _fused_bwd(_: NormWork, pull: Any, gradients: tuple[Tokens, ...]) -> Any:
    return pull(gradients)


_fused.defvjp(_fused_fwd, _fused_bwd)
