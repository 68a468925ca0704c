"""`attention()`: check a call, let decide.py make its plan, and execute the plan.

There is one `custom_jvp`, outside `shard_map`; forward and backward each map over shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from maxattn._plan import Plan
from maxattn.announce import announce, say_when_compiled, warn_of_layout, warn_of_other_mesh
from maxattn.block_sizes import log_lines
from maxattn.call import Call, Role, bound_call
from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.config.asked import checked_config
from maxattn.decide import decide
from maxattn.errors import InputError, Unsupported
from maxattn.jax_private.linear import forward_alone, is_array, linear_call
from maxattn.jax_private.observed import marked
from maxattn.jax_private.overriding import overridden
from maxattn.jax_private.varying import vary_alike
from maxattn.jax_private.vmapped import batched_alike, some_examples
from maxattn.kernels.base import Bias, Inputs, Kernel, Result, Rows, Tangents
from maxattn.kernels.bias_level import Level, bias_level
from maxattn.kernels.gradient_scale import backward_in_range
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Mask
from maxattn.masks.operands import check_finite
from maxattn.sharding import (
    Layout,
    axis_offset,
    check_devices,
    check_layouts,
    check_unchecked,
    explicit_mesh,
    mesh_shape,
    on_shards,
    over_auto_axes,
    pad_axis,
    spec_of_type,
    sum_over,
    usable_mesh,
    ways,
)
from maxattn.target import Target

Query = Float[Array, "B T N H"]
Key = Float[Array, "B S K H"]
Value = Float[Array, "B S K V"]
ROWS = ("BTNH", "BNT", "BTNH", "BNT")  # the axes of out, lse and their gradients
MaskLike = Mask | Bool[Array, "..."] | Bool[np.ndarray, "..."] | None


@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    mask: MaskLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    role: Role = "self",
    return_lse: Literal[False] = False,
) -> Float[Array, "B T N V"]: ...
@overload
def attention(
    q: Query,
    k: Key,
    v: Value,
    mask: MaskLike = None,
    bias: Array | None = None,
    scale: float | None = None,
    config: AttentionConfig | None = None,
    mesh: Any = None,
    role: Role = "self",
    *,
    return_lse: Literal[True],
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]: ...
@answers_names
def attention(
    q: Query,
    k: Key,
    v: Value,
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

    The softmax is float32. A query that sees no key has output 0, LSE -inf and gradients 0.

    Args:
        q: queries [B, T, N, H]; float32, bfloat16 or float16.
        k, v: keys [B, S, K, H] and values [B, S, K, V]; K divides N, and each key head serves N / K
            neighbouring query heads. Keys and values that the mask hides must be finite too, since
            0 * NaN is NaN; the setting `check_finite: true` checks all operands.
        mask: a mask of `maxattn.masks`, or a boolean array [T, S], [B, T, S] or [B, N, T, S], each
            axis full or 1, True = attend; by default every query sees every key. If T = B > 1,
            pass [T, S] as [1, T, S]. For flags [B, S] of real keys pass `masks.KeyPadding(flags)`.
        bias: array added to the scores, broadcasts to [B, N, T, S]; differentiable; default none.
        scale: static factor of the scores; default H ** -0.5.
        config: the settings; default `AttentionConfig()`.
        mesh: the `jax.sharding.Mesh` to split the call over; default the surrounding mesh, if there
            is one. False uses no mesh, and leaves the layout to the compiler.
        role: "self" (default) or "cross"; decides which setting of the config names the kernel,
            `attention` or `cross_attention`.
        return_lse: whether to return (out, lse); default False. lse [B, N, T] is float32, the
            natural logarithm of the sum of the exponentials of the scores, and differentiable.

    Returns:
        out [B, T, N, V] in the dtype of q.

    Raises:
        InputError: shapes or dtypes of q, k, v, mask or bias do not fit together.
        MeshError: batch or heads cannot be divided evenly over the mesh.
        Unsupported: the named kernel or strategy cannot compute this call on this machine.

    >>> x = jax.random.normal(jax.random.key(0), (1, 64, 4, 32))
    >>> out, lse = ma.attention(x, x, x, mask=ma.masks.Causal(), return_lse=True)
    >>> out.shape, lse.shape
    ((1, 64, 4, 32), (1, 4, 64))
    """
    prepared = prepare(q, k, v, mask, bias, scale, config, mesh, role, return_lse)
    if v is None:
        rule, remedy = "v must be an array [B, S, K, V]", "pass the values as v"
        raise InputError("v", "None", rule, remedy)
    warn_of_layout(prepared.call)
    given = {"q": q, "k": k, "v": v, "bias": bias}
    out, lse = attend(prepared, *(as_array(x, name) for name, x in given.items()))
    return (out, lse) if return_lse else out


def as_array(x: Any, name: str) -> Any:
    """Convert an operand, such as an `nnx.Variable`, to an array; return None for None."""
    if x is None or isinstance(x, jax.Array):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        rule, remedy = "it must be an array with values", "use jax.eval_shape or plan(Call.of(...))"
        raise InputError(name, "ShapeDtypeStruct", rule, remedy)
    return jnp.asarray(x)


class Prepared(NamedTuple):
    """A checked call with its bound mask, config and mesh, and notes to add to the plan.

    `wants_mesh` is False after `mesh=False`: then no mesh is missing. An audit prints `name`, the
    module's, and reads the grid of the tokens from `rotary`.
    """

    call: Call
    mask: Mask
    config: AttentionConfig
    mesh: Any
    notes: tuple[str, ...] = ()
    wants_mesh: bool = True
    name: str = ""
    rotary: Any = None


def prepare(
    q: Any, k: Any, v: Any, mask: MaskLike = None, bias: Any = None, scale: float | None = None,
    config: AttentionConfig | None = None, mesh: Any = None, role: Role = "self",
    return_lse: bool = False,
) -> Prepared:  # fmt: skip
    """Check a call and bind its mask, before anything is computed.

    Arguments and errors are as in `attention`, but q, k and v may be `jax.ShapeDtypeStruct`, and v
    may be None if the values are not computed yet.
    """
    config, mesh, given = checked_config(config), usable_mesh(mesh, q), mesh
    config = overridden(config) if role == "self" else config
    padding = config.mask_padding_tokens
    call = bound_call(q, k, v, mask, bias, scale, role, return_lse, mask_padding=padding)
    return Prepared(*call, config, mesh, wants_mesh=given is not False)


def attend(
    prepared: Prepared, q: Query, k: Key, v: Value, bias: Array | None = None
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Plan a prepared call, and run the plan on arrays of the call's shapes."""
    call, mask, config, mesh, notes, wants_mesh, name, rotary = prepared
    check_devices(mesh, q)
    decided = decide(call, config, mesh_shape(mesh), Target.here()).with_notes(notes)
    if decided.kernel.is_pallas:
        check_unchecked(decided.kernel.name)
    announce(decided)
    if wants_mesh:
        warn_of_other_mesh(config, mesh, call.role)
    there = explicit_mesh(q, k, v, bias, mask)
    if there is not None and decided.mesh:
        check_layouts({"q": q, "k": k, "v": v}, {"q": "BTNH", "k": "BSKH", "v": "BSKH"})

    def run_checked(*operands: Any) -> Any:
        operands = marked(operands, decided, config, mesh, name, rotary)
        q, k, v, bias, mask = operands
        if config.check_finite:
            check_finite({"q": q, "k": k, "v": v, "bias": bias}, mask)
        return run(decided, *vary_alike(operands), mesh=mesh)

    if there is None:
        return run_checked(q, k, v, bias, mask)
    batch, tokens, heads, _ = out = spec_of_type(q)
    specs = out, PartitionSpec(batch, heads, tokens)
    return over_auto_axes(run_checked, there, specs)(q, k, v, bias, mask)


def run(
    plan: Plan, q: Query, k: Key, v: Value, bias: Array | None, mask: Mask, mesh: Any = None
) -> tuple[Array, Array]:
    """Execute a plan on a call's arrays; return (out [B, T, N, V], lse [B, N, T]).

    `mask` is bound. `mesh` has the axes that the plan names, and may be None if the plan names no
    axis. Inside a `shard_map` that checks varying axes, all arrays must vary over the same axes.
    """
    if bias is not None:
        bias = jnp.reshape(bias, plan.call.bias or bias.shape)
    return _run(plan, mesh if plan.mesh else None, q, k, v, bias, mask)


# ---- execution -----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def _run(
    plan: Plan, mesh: Any, q: Array, k: Array, v: Array, bias: Bias, mask: Mask
) -> tuple[Array, Array]:
    if plan.kv_repeat > 1:
        k, v = (jnp.repeat(x, plan.kv_repeat, axis=2) for x in (k, v))
    level = None if bias is None else _bias_level(plan, mesh, jax.lax.stop_gradient(bias), mask)
    out, lse = cast(Any, _attend(plan, mesh, False, q, k, v, bias, mask, level))
    return out, lse if level is None else lse + level[:, :, : plan.call.q_len, 0]


def _bias_level(plan: Plan, mesh: Any, bias: Array, mask: Mask) -> Level:
    """Return each query's bias level (see bias_level.py); a T axis is padded to whole shards."""
    mask = plan.full_mask(mask)
    letters, specs, _ = plan.strategy.operand_specs(plan.padded_call, mask)
    # Each device has the bias of its own queries and all keys; with Ulysses, of all queries.
    own_rows = bool(specs[5][2])
    rows = plan.q_len // ways("T", plan.mesh) if own_rows else plan.q_len

    def of_shard(bias: Array, mask: Mask) -> Level:
        start = axis_offset("context", plan.mesh, rows) if own_rows else 0
        return bias_level(bias, mask, rows, start)

    layout = _layout(plan, mesh)
    return on_shards(of_shard, layout, (bias, mask), letters[3:5], specs[3:5], specs[5])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _attend(plan: Plan, mesh: Any, is_differentiated: bool, *operands: Any) -> Any:
    # Here and in the backward, the LSE excludes the level of the bias (bias_level.py).
    kernel = plan.kernel if is_differentiated else plan.kernel.for_inference()
    result = _forward(plan, kernel, mesh, *operands)
    # If the mask hides every key, the result depends on no operand; its tangent still does.
    out, lse, *_ = batched_alike(*result, *jax.tree.leaves(operands))
    return out, lse


@partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(plan: Plan, mesh: Any, _: bool, operands: Any, tangents: Any) -> Any:
    """Return (out, lse) and their tangents, whose transpose is the kernel's backward."""
    result = _attend(plan, mesh, True, *operands)
    if plan.target.platform == "gpu":
        # In a scan over layers XLA merges a custom call with the store of its result for the
        # backward, and runs it once more for other readers of the result (jax 0.11.2; 287 of 2,132
        # ms per step of Wan 1.3B). A barrier prevents the merge.
        result = jax.lax.optimization_barrier(result)
    # Named inside the rule: a policy that saves both names has all that the backward needs.
    result = checkpoint_name(result[0], "attn_out"), checkpoint_name(result[1], "attn_lse")
    moved = {i: x for i, x in enumerate(tangents[:4]) if is_array(x)}
    kernel = plan.kernel if 3 in moved else plan.kernel.without_dbias()

    def transposed(residuals: Any, cotangents: Any) -> dict[int, Array]:
        grads = _once(plan, partial(_backward, plan, kernel, mesh), residuals, cotangents)
        return {i: grads[i] for i in moved}

    if not moved:
        return result, jax.tree.map(jnp.zeros_like, result)
    tangent = partial(_once, plan, partial(_tangent, plan))
    return result, linear_call(tangent, transposed, (*operands, *result), moved, result)


def _tangent(plan: Plan, residuals: Any, moved: dict[int, Array]) -> tuple[Array, Array]:
    """Return the tangents of (out, lse); a mesh leaves their layout to the compiler."""
    tangent = plan.kernel.computes.tangent
    if tangent is None:
        name = plan.kernel.name
        rule = f"{name} has a backward, and no forward mode (jvp, linearize, jacfwd)"
        remedy = "set attention: dot_product, or use reverse mode: jax.vjp, jax.grad or jax.jacrev"
        raise Unsupported("derivative", "forward mode (jvp)", rule, remedy)
    q, k, v, bias, mask, level, out, lse = residuals
    level = None if level is None else level[:, :, : q.shape[1]]  # padded to whole shards
    inputs = Inputs(q, k, v, bias, mask, bias_level=level)
    given = Tangents(*(moved.get(i) for i in range(4)))
    return tuple(tangent(inputs, Result(out, lse), given))


def _once(plan: Plan, compute: Callable[..., Any], *operands: Any) -> Any:
    """Run a pass over a first derivative; refuse second ones that the kernel does not have."""
    if plan.kernel.differentiates_twice:
        return compute(*operands)

    def refuse(*_: Any) -> Any:
        rule = f"{plan.kernel.name} computes first derivatives only"
        remedy = "set attention: dot_product, whose second derivatives jax computes"
        raise Unsupported("derivative", "second", rule, remedy)

    if plan.kernel.computes.tangent is not None:
        return forward_alone(compute, refuse)(*operands)
    once = jax.custom_jvp(compute)
    once.defjvp(refuse)
    return once(*operands)


def _backward(
    plan: Plan, kernel: Kernel, mesh: Any, residuals: Any, cotangents: tuple[Array, Array]
) -> Any:
    q, k, v, bias, mask, level, out, lse = residuals
    lse, mask = pad_axis(lse, 2, plan.q_len, NEG_INF), plan.full_mask(mask)

    def of_shard(*operands: Any) -> tuple[Array, Array, Array, Bias]:
        *arrays, level = operands[:6]
        given = Inputs(*arrays, bias_level=level), Rows(*operands[6:]), plan.call, plan.token_axes
        dq, dk, dv, dbias = backward_in_range(partial(plan.strategy.backward, kernel), *given)
        return dq, dk, dv, None if dbias is None else sum_over(dbias, plan.bias_axes, plan.mesh)

    letters, specs, lse_spec = plan.strategy.operand_specs(plan.padded_call, mask)
    of_q, of_kv, _, of_bias, *_ = specs
    given = q, k, v, bias, mask, level, out, lse, *cotangents
    letters, specs = (*letters, *ROWS), (*specs, of_q, lse_spec, of_q, lse_spec)
    grads = on_shards(
        of_shard, _layout(plan, mesh), given, letters, specs, (of_q, of_kv, of_kv, of_bias)
    )
    dq, dk, dv = (
        g[:, : x.shape[1]].astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=False)
    )
    dbias = grads[3]
    if bias is not None:
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return dq, dk, dv, dbias


def _layout(plan: Plan, mesh: Any) -> Layout:
    return Layout(mesh, plan.mesh, {"T": plan.q_len, "S": plan.kv_len})


def _forward(plan: Plan, kernel: Kernel, mesh: Any, *operands: Any) -> tuple[Array, Array]:
    q, *others = operands
    q = say_when_compiled(q, log_lines(plan.call.role, kernel.changes))
    if kernel.needs_an_example:
        q, *others = some_examples(kernel.name, (q, *others))
    *arrays, mask, level = others
    mask = plan.full_mask(mask)

    def of_shard(*operands: Any) -> tuple[Array, Array]:
        *arrays, level = operands
        out, lse = plan.strategy.forward(kernel, Inputs(*arrays, bias_level=level))
        return out, lse

    letters, specs, lse_spec = plan.strategy.operand_specs(plan.padded_call, mask)
    given, results = (q, *arrays, mask, level), (specs[0], lse_spec)
    out, lse = on_shards(of_shard, _layout(plan, mesh), given, letters, specs, results)
    return out[:, : plan.call.q_len], lse[:, :, : plan.call.q_len]
