"""`attention()`: run a plan. One `custom_vjp`, outside `shard_map`; forward and backward each map
over shards.

It decides nothing: `plan.py` does, and this file executes what the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float

from maxattn import sharding
from maxattn.announce import announce, say_when_compiled, warn_of_other_mesh
from maxattn.block_sizes import log_lines
from maxattn.call import Call, Role, as_mask, check_operands
from maxattn.config import AttentionConfig
from maxattn.decide import checked_config, plan, without_padding
from maxattn.errors import InputError, MeshError
from maxattn.jax_private.mesh import ambient_mesh, axis_names_of_type, is_tracer
from maxattn.jax_private.varying import checked_axes, vary_over, varying_axes
from maxattn.kernels.base import Bias, Inputs, Kernel, Rows
from maxattn.kernels.bias_shift import level_of, levelled
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Mask
from maxattn.plan import Plan
from maxattn.sharding import (
    AXES,
    mesh_shape,
    over_shards,
    pad_axis,
    spec_of,
    sum_over,
    to_partition_spec,
)
from maxattn.target import Target

Query = Float[Array, "B T N H"]
Key = Float[Array, "B S K H"]
MaskLike = Mask | Bool[Array, "..."] | Bool[np.ndarray, "..."] | None


@overload
def attention(
    q: Query,
    k: Key,
    v: Key,
    mask: MaskLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    role: Role = "self",
    return_lse: Literal[False] = False,
) -> Query: ...
@overload
def attention(
    q: Query,
    k: Key,
    v: Key,
    mask: MaskLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    role: Role = "self",
    *,
    return_lse: Literal[True],
) -> tuple[Query, Float[Array, "B N T"]]: ...
def attention(
    q: Query,
    k: Key,
    v: Key,
    mask: MaskLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    role: Role = "self",
    return_lse: bool = False,
) -> Any:
    """Compute attention with the kernel and the parallelism that the config asks for.

        out = softmax(scale * q k^T + bias, over allowed keys) v

    Softmax statistics are float32. A query with nothing to attend to gives 0, LSE -inf and
    gradients 0.

    Args:
        q: queries [B, T, N, H]; float32, bfloat16 or float16.
        k, v: keys and values [B, S, K, H], K divides N: query heads n*N/K ... share key head n.
        mask: a mask of `maxattn.masks`, or a boolean array [T, S], [B, T, S] or [B, N, T, S], each
            axis full or 1, True = attend.
        bias: added to the scores, broadcasts to [B, N, T, S]; differentiable.
        scale: a number; default H ** -0.5.
        config: default `AttentionConfig()`.
        mesh: the `jax.sharding.Mesh` to shard over; default the surrounding mesh, if there is one.
        role: "self" or "cross": which setting of the config governs the call.
        return_lse: return (out, lse [B, N, T] float32, natural logarithm); differentiable.

    Raises:
        InputError: shapes, dtypes, mask or bias do not fit.
        MeshError: batch or heads do not divide over the mesh.
        Unsupported: what the config names cannot compute this call here.
    """
    config = checked_config(config)
    check_operands(q, k, v)
    if v is None:
        raise InputError(
            "v", "None", "v must be an array [B, S, K, H]", "pass the values beside the keys"
        )
    mesh = _usable_mesh(mesh, q)
    bound = bind_mask(mask, q, k, config)
    call = Call.of(q, k, bound, bias, scale, role, return_lse)
    target = Target.here()
    decided = plan(call, config, mesh, target)
    _check_surroundings(decided)
    announce(decided)
    warn_of_other_mesh(config, mesh, role)
    out, lse = run(decided, q, k, v, bias, bound, mesh)
    return (out, lse) if return_lse else out


def run(
    plan: Plan, q: Query, k: Key, v: Key, bias: Array | None, mask: Mask, mesh: Any = None
) -> tuple[Array, Array]:
    """Execute a plan on arrays of the call it was made for.

    Args:
        plan: from `plan()`.
        q, k, v, bias, mask: as for `attention`; the mask is bound.
        mesh: the mesh whose axes the plan names, or None where it names none.

    Returns:
        out [B, T, N, H] and lse [B, N, T] float32.
    """
    if bias is not None:
        bias = jnp.reshape(bias, plan.call.bias or bias.shape)
    return _run(plan, mesh if plan.mesh else None, q, k, v, bias, mask)


# ---- inputs --------------------------------------------------------------------------------------


def bind_mask(mask: MaskLike, q: Query, k: Key, config: AttentionConfig) -> Mask:
    """Turn what the caller gave as a mask into a bound mask.

    Raises:
        InputError: an array that is not boolean, or does not broadcast.
    """
    (b, t, n, _), s = q.shape, k.shape[1]
    bound = as_mask(mask, q, k).bind(t, s, b, n)
    return bound if config.mask_padding_tokens else without_padding(bound)


def _usable_mesh(mesh: Any, q: Any) -> Any:
    """Return the mesh to map over: the one given, else the surrounding one; refuse what cannot be
    mapped over.
    """
    ambient = ambient_mesh()
    if mesh is None and (ambient is None or not set(AXES) & set(ambient.axis_names)):
        return None
    mesh = ambient if mesh is None else mesh
    if isinstance(mesh, Mapping):
        raise MeshError(
            "mesh",
            mesh,
            "attention runs on devices; sizes alone are for plan()",
            "pass config.make_mesh()",
        )
    if not mesh_shape(mesh):
        return mesh
    _check_devices(mesh, ambient, q)
    return mesh


def _check_devices(mesh: Any, ambient: Any, q: Any) -> None:
    """Refuse a mesh that jax cannot map over here: not the surrounding one, without devices, not
    where q is.
    """
    sharding.check_surrounding(mesh)
    if is_tracer(q):
        return
    if ambient is None and isinstance(mesh, AbstractMesh):
        raise MeshError(
            "mesh",
            "AbstractMesh",
            "it has no devices to run on",
            "pass a Mesh; plan() takes either",
        )
    if (
        isinstance(mesh, Mesh)
        and getattr(q, "committed", False)
        and q.sharding.device_set != set(mesh.devices.flat)
    ):
        raise MeshError(
            "mesh",
            dict(mesh.shape),
            "q was put on other devices than those of the mesh",
            "put the arrays on the mesh, e.g. with jax.device_put(q, NamedSharding(mesh,"
            " PartitionSpec()))",
        )


def _check_surroundings(plan: Plan) -> None:
    """Refuse a Pallas kernel where jax would: in a `shard_map` over all axes that checks what
    varies over them.
    """
    ambient = ambient_mesh()
    if ambient is None or not plan.kernel.is_pallas:
        return
    manual = axis_names_of_type(ambient, AxisType.Manual)
    if manual == set(ambient.axis_names) and checked_axes(manual):
        raise MeshError(
            "check_vma",
            True,
            f"{plan.kernel.name} is a Pallas kernel, and this shard_map checks what varies over its"
            f" axes, {', '.join(sorted(manual))}",
            "pass check_vma=False to jax.shard_map, or set attention: dot_product",
        )


# ---- execution -----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def _run(
    plan: Plan, mesh: Any, q: Array, k: Array, v: Array, bias: Bias, mask: Mask
) -> tuple[Array, Array]:
    q, k, v, bias, mask = vary_over((q, k, v, bias, mask), varying_axes((q, k, v, bias, mask)))
    if plan.kv_repeat > 1:
        k, v = (jnp.repeat(x, plan.kv_repeat, axis=2) for x in (k, v))
    out, lse = cast(tuple[Array, Array], _attend(plan, mesh, q, k, v, bias, mask))
    return out, lse if bias is None else lse + level_of(bias)[..., 0]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    plan: Plan, mesh: Any, q: Array, k: Array, v: Array, bias: Bias, mask: Mask
) -> tuple[Array, Array]:
    # The LSE is that of the bias without its level (bias_shift.py), here and for the backward.
    # Runs where nothing is differentiated; _attend_fwd runs instead of it where something is.
    return _forward(plan, plan.kernel.for_inference(), mesh, q, k, v, bias, mask)


def _attend_fwd(plan: Plan, mesh: Any, q: Array, k: Array, v: Array, bias: Bias, mask: Mask) -> Any:
    result = _forward(plan, plan.kernel, mesh, q, k, v, bias, mask)
    if plan.target.platform == "gpu":
        # In a scan over layers XLA merges a custom call with the store of its result for the
        # backward, and runs it once more for whoever else reads the result (jax 0.11.2; 287 of
        # 2,132 ms a step of Wan 1.3B). Not over a barrier.
        result = jax.lax.optimization_barrier(result)
    # Named here, inside the rule: a policy that saves both names then has all that the backward
    # needs.
    out, lse = checkpoint_name(result[0], "attn_out"), checkpoint_name(result[1], "attn_lse")
    return (out, lse), (q, k, v, bias, mask, out, lse)


def _attend_bwd(plan: Plan, mesh: Any, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, bias, mask, out, lse = residuals
    dout, dlse = cotangents
    operands = _padded(plan, q, k, v, bias, mask)
    rows = [pad_axis(x, 1, plan.q_len) for x in (out, dout)]
    stats = [pad_axis(lse, 2, plan.q_len, NEG_INF), pad_axis(dlse, 2, plan.q_len)]
    s = _specs(plan, operands[4])
    body: Any = over_shards(
        partial(_backward_on_shards, plan),
        mesh,
        plan.mesh,
        (*s[:5], s[0], s[5], s[0], s[5]),
        (s[0], s[1], s[1], s[3]),
    )
    dq, dk, dv, dbias = vary_over(
        body(*operands, rows[0], stats[0], rows[1], stats[1]), varying_axes(q)
    )
    dq, dk, dv = dq[:, : q.shape[1]], dk[:, : k.shape[1]], dv[:, : v.shape[1]]
    if bias is not None:
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dbias, None


def _backward_on_shards(plan: Plan, *operands: Any) -> tuple[Array, Array, Array, Bias]:
    inputs, rows = Inputs(*operands[:5]), Rows(*operands[5:])
    dq, dk, dv, dbias = plan.context.backward(plan.kernel, inputs, rows)
    return dq, dk, dv, None if dbias is None else sum_over(dbias, plan.bias_axes, plan.mesh)


def _forward_on_shards(plan: Plan, kernel: Kernel, *operands: Any) -> tuple[Array, Array]:
    out, lse = plan.context.forward(kernel, Inputs(*operands))
    return out, lse


_attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(
    plan: Plan, kernel: Kernel, mesh: Any, q: Array, k: Array, v: Array, bias: Bias, mask: Mask
) -> tuple[Array, Array]:
    operands = _padded(plan, q, k, v, bias, mask)
    specs = _specs(plan, operands[4])
    body = over_shards(
        partial(_forward_on_shards, plan, kernel),
        mesh,
        plan.mesh,
        tuple(specs[:5]),
        (specs[0], specs[5]),
    )
    # Our own shard_map does not check what varies, and so forgets over which axes of a surrounding
    # one its results do.
    out, lse = vary_over(body(*operands), varying_axes(q))
    out = say_when_compiled(out, log_lines(plan.call.role, kernel.changes))
    return out[:, : plan.call.q_len], lse[:, :, : plan.call.q_len]


def _padded(plan: Plan, q: Array, k: Array, v: Array, bias: Bias, mask: Mask) -> tuple[Any, ...]:
    """Pad every operand to whole shards and add the limit that masks what was added."""
    sizes = {"T": plan.q_len, "S": plan.kv_len}
    q = pad_axis(q, 1, plan.q_len)
    k, v = (pad_axis(x, 1, plan.kv_len) for x in (k, v))
    if bias is not None:
        bias = levelled(bias)
        bias = _pad_letters(
            bias,
            "".join(c if n > 1 else "1" for c, n in zip("BNTS", bias.shape, strict=True)),
            sizes,
        )
    mask = jax.tree.map(lambda x, letters: _pad_letters(x, letters, sizes), mask, mask.leaf_axes())
    return q, k, v, bias, plan.full_mask(mask)


def _pad_letters(x: Array, letters: str, sizes: dict[str, int]) -> Array:
    """Pad the axes named T and S; broadcast axes are named 1 and stay."""
    for axis, letter in enumerate(letters):
        if letter in sizes:
            x = pad_axis(x, axis, sizes[letter])
    return x


def _specs(plan: Plan, mask: Mask) -> tuple[Any, ...]:
    """Return the partition specs of (q, k, v, bias, mask, lse)."""
    specs = plan.context.specs(plan.padded_call)
    q, kv, lse, bias = (to_partition_spec(s) for s in (specs.q, specs.kv, specs.lse, specs.bias))
    masks = jax.tree.map(lambda letters: _mask_spec(letters, plan), mask.leaf_axes())
    return q, kv, kv, bias if plan.call.bias else None, masks, lse


def _mask_spec(letters: str, plan: Plan) -> PartitionSpec:
    return to_partition_spec(spec_of(plan.context.mask_letters(letters), plan.mesh))
