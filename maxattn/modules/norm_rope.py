"""Bias, norm and rotary embedding of queries and keys, as one kernel on NVIDIA GPUs and TPUs.

XLA computes the gradient on GPUs, a second kernel on TPUs. Elsewhere `qk_norm.py` and
`maxattn.rope` compute the same steps. All paths take the projection's result, compute in float32,
and round once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.jax_private.linear import linear_call
from maxattn.modules import norm_rope_tpu
from maxattn.modules.norm_rope_tpu import Tables, Vectors
from maxattn.modules.qk_norm import QKNorm, ZeroCentredRMSNorm, scale_of
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowLaunch, RowWork, VectorParts
from maxattn.rope import Rotary, apply_rotary
from maxattn.target import Target

DTYPES = ("bfloat16", "float16", "float32")
KINDS: dict[str | None, str | None] = {"rms_norm": "head", "zero_centred_rms_norm": "head"}
KINDS |= {"rms_norm_across_heads": "across", None: None}


@dataclass(frozen=True)
class NormRope:
    """The decision how queries or keys are normalised and rotated, which the plan prints.

    Args:
        work: the kernel's work on one row of a shard; None if XLA computes the steps.
        sms: streaming multiprocessors of the GPU; 0 on a TPU, which runs norm_rope_tpu.py.
        shared: bytes of shared memory of an SM.
        reason: why XLA computes the steps; "" if the kernel runs, or is not for this machine.
        interpret: whether Pallas' interpreter runs a TPU's kernel, for tests.
    """

    work: RowWork | None = None
    sms: int = 0
    shared: int = 0
    reason: str = ""
    interpret: bool = False

    @property
    def note(self) -> str:
        """Return the plan's line about the decision; "" if the kernel is not for this machine."""
        if self.work is not None and not self.sms:
            return "norm, rotary embedding and transpose of the heads in one kernel"
        if self.work is not None:
            shared = f"{self.work.threads} threads share a token"
            return f"norm and rotary embedding in one kernel, written in CuTe: {shared}"
        text = f"norm and rotary embedding by XLA, step by step: {self.reason}"
        return text if self.reason else ""

    def launch(self, width: int, names: Any) -> RowLaunch:
        """Return the launch for rows with `width` bytes per number and the named vectors."""
        assert self.work is not None
        work = replace(self.work, vectors=tuple((name, VectorParts()) for name in names))
        return RowLaunch(work, (width,), self.sms, self.shared)


def decide(
    target: Target,
    x: Any,
    qk_norm: str | None,
    norm: QKNorm | None,
    rotary: Rotary | None,
    heads: int,
    head_dim: int,
    mesh: Any = None,
    letters: str = "BTNH",
) -> NormRope:
    """Decide how queries or keys are normalised and rotated.

    The kernel runs on TPUs, and on NVIDIA GPUs with fa4-jax, if batch, tokens and heads divide over
    the mesh. `x` is the projection's input [B, T, C], or its shape and dtype; `letters` are the
    axes of the result, for its sharding.
    """
    on_tpu = target.platform == "tpu"
    has_kernel = on_tpu or target.device.vendor == "NVIDIA"
    # On a TPU XLA computes a norm alone in the projection's matmul, and `tpu_few_keys`, which
    # cross-attention calls, reads its rows without a transpose.
    if not has_kernel or (rotary is None and (norm is None or on_tpu)):
        return NormRope()
    shape, kind = sharding.mesh_shape(mesh), KINDS.get(qk_norm) if norm is not None else None
    sizes = zip(letters, (*x.shape[:2], heads), strict=False)
    odd = [letter for letter, n in sizes if n % sharding.ways(letter, shape)]
    # A subclass may compute something else.
    is_known = qk_norm in KINDS and type(norm) in (type(None), nnx.RMSNorm, ZeroCentredRMSNorm)
    if not is_known or (rotary is not None and (rotary.partial or rotary.cos.ndim == 4)):
        why = "the kernel needs an RMS norm, and one rotary table of all channels for all heads"
    elif x.dtype.name not in DTYPES:
        why = f"the kernel takes {', '.join(DTYPES)}, and x is {x.dtype.name}"
    elif kind == "across" and sharding.ways("N", shape) > 1:
        why = "the norm is over all heads, which are split over devices"
    elif odd:
        why = f"axis {odd[0]} does not divide over the mesh"
    else:
        why = call.why_not_here(mesh) if on_tpu else call.why_not(target, mesh)
    if why:
        return NormRope(reason=why)
    eps, style = 0.0 if norm is None else norm.epsilon, None if rotary is None else rotary.style
    work = RowWork(heads // sharding.ways(letters[2], shape), head_dim, kind, eps, style)
    if on_tpu:
        why = norm_rope_tpu.why_not(work)
        return NormRope(reason=why) if why else NormRope(work)
    found = NormRope(work, target.device.sms, target.device.family.shared_memory)
    if not found.launch(x.dtype.itemsize, ("bias", "scale")).fits():
        return NormRope(reason=f"the kernel cannot take {heads} heads of dim {head_dim}")
    return found


def norm_rotary(
    how: NormRope,
    x: Float[Array, "B T NH"],
    bias: Float[Array, " NH"] | None,
    norm: QKNorm | None,
    rotary: Rotary | None,
    mesh: Any = None,
    letters: str = "BTNH",
) -> Float[Array, "B T N H"]:
    """Add the bias (None if x has it), normalise and rotate, in one kernel; see `decide`."""
    assert how.work is not None
    (b, t, _), head_dim, shape = x.shape, how.work.head_dim, sharding.mesh_shape(mesh)
    vectors = {"bias": bias, "scale": None if norm is None else scale_of(norm)}
    by_head = {name: v.reshape(-1, head_dim) for name, v in vectors.items() if v is not None}
    if shape:
        # Gradients of the vectors are summed over devices before they are rounded.
        by_head = {name: v.astype(jnp.float32) for name, v in by_head.items()}
    angles = () if rotary is None else (rotary.cos, rotary.sin)
    tables = tuple(jnp.asarray(a, jnp.float32).reshape(-1, t, a.shape[-1]) for a in angles)
    examples = ["B" if len(a) == b else "1" for a in tables]
    heads = {name: letters[2] if len(v) > 1 else "1" for name, v in by_head.items()}
    specs = (
        sharding.partition_spec(letters, shape),
        {name: sharding.partition_spec(letter + "H", shape) for name, letter in heads.items()},
        tuple(sharding.partition_spec(one + letters[1] + "H", shape) for one in examples),
    )
    run = sharding.over_shards(partial(on_shard, how), mesh, shape, specs, specs[0])
    return run(x.reshape(b, t, -1, head_dim), by_head, tables)


# ---- one device ----------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def on_shard(
    how: NormRope, x: Float[Array, "B T N H"], vectors: Vectors, tables: Tables
) -> Float[Array, "B T N H"]:
    """Normalise and rotate the heads of one device; tables are [B or 1, T, H/2]."""
    assert how.work is not None
    if not how.sms:
        return norm_rope_tpu.forward(how.work, x, vectors, tables, how.interpret)
    launch, rows = how.launch(x.dtype.itemsize, vectors), x.reshape(*x.shape[:2], -1)
    parts = tuple(v.reshape(1, 1, 1, -1) for v in vectors.values())
    angles = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    return call.norm_rows(launch, (rows,), parts, angles)[0].reshape(x.shape)


@on_shard.defjvp
def _on_shard_jvp(how: NormRope, primals: Any, tangents: Any) -> Any:
    assert how.work is not None
    x, vectors, tables = primals
    # In a scan over layers XLA fuses the projection's matmul with the store of its result for the
    # backward, and runs the matmul again for the kernel (jax 0.11.2). The barrier prevents that.
    kept = jax.lax.optimization_barrier if how.sms else lambda x: x
    x = kept(x)
    y = kept(on_shard(how, x, vectors, tables))
    steps = partial(in_steps, how.work)

    def tangent(kept: Any, moved: Any) -> Array:
        return jax.jvp(steps, kept, moved)[1]

    def transposed(kept: Any, dy: Array) -> Any:
        # XLA computes the steps again: keeping their float32 results would take twice the memory
        # of x. The gradient of the tables is seldom read, and then not computed.
        found = _gradients_in_steps(how.work, (*kept, dy))
        return found if how.sms else (*_gradients(how, *kept, dy), found[2])

    return y, linear_call(tangent, transposed, (x, vectors, tables), tangents, y)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gradients(how: NormRope, *operands: Any) -> tuple[Array, Vectors]:
    assert how.work is not None
    x, vectors, tables, dy = operands
    return norm_rope_tpu.backward(how.work, x, vectors, tables, dy, how.interpret)


@_gradients.defjvp
def _gradients_jvp(how: NormRope, primals: Any, tangents: Any) -> Any:
    steps = partial(_gradients_in_steps, how.work)
    return _gradients(how, *primals), jax.jvp(steps, (primals,), (tangents,))[1][:2]


def _gradients_in_steps(work: Any, operands: Any) -> Any:
    x, vectors, tables, dy = operands
    return jax.vjp(partial(in_steps, work), x, vectors, tables)[1](dy)


def in_steps(
    work: RowWork, x: Float[Array, "B T N H"], vectors: Vectors, tables: Tables
) -> Float[Array, "B T N H"]:
    """Compute the steps of the kernel with XLA."""
    # [N or 1, H] -> [1, 1, N or 1, H]
    vectors = {name: v[None, None] for name, v in vectors.items()}
    z = jnp.asarray(x, jnp.float32) + vectors.get("bias", 0.0)
    if work.norm is not None:
        axes = (2, 3) if work.norm == "across" else 3
        r = jax.lax.rsqrt(jnp.mean(z * z, axes, keepdims=True) + work.eps)
        z = z * r * vectors.get("scale", 1.0)
    if work.style is not None:
        cos, sin = tables
        z = apply_rotary(z, Rotary(cos, sin, work.style))
    return z.astype(x.dtype)
