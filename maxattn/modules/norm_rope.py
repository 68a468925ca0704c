"""Bias, norm and rotary embedding of queries and keys, as one kernel on NVIDIA GPUs.

Elsewhere `qk_norm.py` and `maxattn.rope` compute the same, one after the other. The kernel stays in
float32 from the projection to the result; the others round to the compute dtype in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.modules.qk_norm import QKNorm, ZeroCentredRMSNorm, scale_of
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowLaunch, RowWork, VectorParts
from maxattn.rope import Rotary, apply_rotary
from maxattn.target import Target

DTYPES = ("bfloat16", "float16", "float32")
KINDS = {
    None: None,
    "rms_norm": "head",
    "zero_centred_rms_norm": "head",
    "rms_norm_across_heads": "across",
}
Vectors = dict[str, Float[Array, "#N H"]]
Tables = tuple[Array, ...]


@dataclass(frozen=True)
class NormRope:
    """How queries or keys are normed and rotated: decided once for a call, printed by its plan."""

    path: str = "xla"  # step by step; or "cute", one kernel
    reason: str = ""  # why it is not the kernel; "" on machines that have none
    work: RowWork | None = None  # what the kernel does to a row of one device
    sms: int = 0  # of the GPU
    shared: int = 0  # bytes of shared memory that an SM gives

    @property
    def note(self) -> str:
        """Return a plan's line; empty on machines that have no kernel."""
        if self.work is not None:
            shared = f"{self.work.threads} threads share a row"
            return f"norm and rotary embedding in one kernel, written in CuTe: {shared}"
        text = f"norm and rotary embedding by XLA, step by step: {self.reason}"
        return text if self.reason else ""

    def launch(self, width: int, names: Any, is_backward: bool = False) -> RowLaunch:
        """Return how rows with numbers of `width` bytes, and the named vectors, are launched."""
        assert self.work is not None
        work = replace(self.work, vectors=tuple((name, VectorParts()) for name in names))
        widths = (width, width) if is_backward else (width,)
        return RowLaunch(work, widths, is_backward, self.sms, self.shared)


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
    """Decide how queries or keys are normed and rotated.

    The kernel takes them on NVIDIA GPUs with fa4-jax, where each device has equally many whole
    rows.

    Args:
        x: what is projected to them, [B, T, C], or its shape and dtype.
        qk_norm, norm: the kind of the norm, and the norm.
        rotary: its table, checked against the heads.
        letters: of the result's axes.
    """
    if target.device.vendor != "NVIDIA" or (norm is None and rotary is None):
        return NormRope()
    shape, kind = sharding.mesh_shape(mesh), KINDS.get(qk_norm) if norm is not None else None
    sizes = zip(letters, (*x.shape[:2], heads), strict=False)
    odd = [letter for letter, n in sizes if n % sharding.ways(letter, shape)]
    # A class of their own may do other things.
    is_known = qk_norm in KINDS and type(norm) in (type(None), nnx.RMSNorm, ZeroCentredRMSNorm)
    if not is_known or (rotary is not None and (rotary.partial or rotary.cos.ndim == 4)):
        why = "the kernel takes RMS norms, and angles that all heads share, of all channels"
    elif x.dtype.name not in DTYPES:
        why = f"the kernel takes {', '.join(DTYPES)}, and this is {x.dtype.name}"
    elif kind == "across" and sharding.ways("N", shape) > 1:
        why = "the norm goes over heads of several devices"
    elif odd:
        why = f"axis {odd[0]} does not divide over the mesh"
    else:
        why = call.why_not(target, mesh)
    if why:
        return NormRope(reason=why)
    eps, style = 0.0 if norm is None else norm.epsilon, None if rotary is None else rotary.style
    work = RowWork(heads // sharding.ways(letters[2], shape), head_dim, kind, eps, style)
    found = NormRope("cute", "", work, target.device.sms, target.device.family.shared_memory)
    ways = (found.launch(x.dtype.itemsize, ("bias", "scale"), back) for back in (False, True))
    if not all(launch.fits() for launch in ways):
        return NormRope(reason=f"the kernel takes no rows of {heads} x {head_dim}")
    return found


class Unnormed(NamedTuple):
    """A projection, and what the kernel does to it."""

    how: NormRope
    x: Float[Array, "B T NH"]
    bias: Float[Array, " NH"] | None  # where it is not in x yet
    norm: QKNorm | None
    rotary: Rotary | None

    def operands(self, mesh: Any = None) -> tuple[Array, Vectors, Tables]:
        """Return the heads [B, T, N, H], bias and scale by heads, and the angles."""
        assert self.how.work is not None
        (b, t, _), head_dim = self.x.shape, self.how.work.head_dim
        vectors = {} if self.bias is None else {"bias": jnp.reshape(self.bias, (-1, head_dim))}
        if self.norm is not None and (scale := scale_of(self.norm)) is not None:
            vectors["scale"] = jnp.reshape(scale, (-1, head_dim))
        if sharding.mesh_shape(mesh):
            # Their gradients are summed over devices before they are rounded.
            vectors = {name: v.astype(jnp.float32) for name, v in vectors.items()}
        angles = () if self.rotary is None else (self.rotary.cos, self.rotary.sin)
        tables = (jnp.asarray(a, jnp.float32).reshape(-1, t, a.shape[-1]) for a in angles)
        return jnp.reshape(self.x, (b, t, -1, head_dim)), vectors, tuple(tables)


def norm_rotary(of: Unnormed, mesh: Any = None, letters: str = "BTNH") -> Float[Array, "B T N H"]:
    """Add a bias, norm and rotate queries or keys, in one kernel; arguments as for `decide`."""
    shape, (x, vectors, tables) = sharding.mesh_shape(mesh), of.operands(mesh)
    examples = ["B" if len(a) == len(x) else "1" for a in tables]
    heads = {name: letters[2] if len(v) > 1 else "1" for name, v in vectors.items()}
    specs = (
        sharding.partition_spec(letters, shape),
        {name: sharding.partition_spec(letter + "H", shape) for name, letter in heads.items()},
        tuple(sharding.partition_spec(one + letters[1] + "H", shape) for one in examples),
    )
    run = partial(on_shard, of.how)
    return sharding.over_shards(run, mesh, shape, specs, specs[0])(x, vectors, tables)


def can_go_together(hows: list[NormRope], mesh: Any) -> bool:
    """Tell whether one launch can take several projections: by the kernel, on one device."""
    return all(n == 1 for _, n in sharding.mesh_shape(mesh)) and all(how.work for how in hows)


def norm_rotary_together(
    each: list[Unnormed], joint: bool = False
) -> tuple[Float[Array, "B T N H"], ...]:
    """Norm and rotate queries and keys of the same tokens, or sequences that attend together.

    Args:
        each: the projections; queries and keys that differ in kind or in angles go one by one.
        joint: whether they are written one behind the other.

    Returns:
        Queries and keys, or the joint sequence alone.
    """
    operands = tuple(of.operands() for of in each)
    hows = tuple(of.how for of in each)
    kinds = [jax.tree.map(lambda a: (a.shape, a.dtype), of[:2]) for of in operands]
    angles = [None if of.rotary is None else id(of.rotary.cos) for of in each]
    if joint or (hows[0], kinds[0], angles[0]) == (hows[1], kinds[1], angles[1]):
        return _together(hows, joint, operands)
    return tuple(norm_rotary(of) for of in each)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _together(hows: tuple[NormRope, ...], joint: bool, each: tuple[Any, ...]) -> tuple[Array, ...]:
    if not joint:
        (q, of_q, tables), (k, of_k, _) = each
        launch = hows[0].launch(q.dtype.itemsize, of_q)
        parts = tuple((_part(of_q[name]), _part(of_k[name])) for name in of_q)
        both = (_rows(q), _rows(k))
        found = call.forward(launch, (both,), parts, _lines(tables), name="norm_rotary_pair")
        return tuple(y.reshape(q.shape) for y in found)
    lengths = [x.shape[1] for x, _, _ in each]
    b, _, *head = each[0][0].shape
    out: Any = jax.ShapeDtypeStruct((b, sum(lengths), head[0] * head[1]), each[0][0].dtype)
    firsts = accumulate(lengths, initial=0)
    for how, (x, vectors, tables), first in zip(hows, each, firsts, strict=False):
        launch = how.launch(x.dtype.itemsize, vectors)
        parts = tuple((_part(v),) for v in vectors.values())
        where: dict[str, Any] = {"first": first, "into": out, "name": "norm_rotary_into"}
        (out,) = call.forward(launch, ((_rows(x),),), parts, _lines(tables), **where)
    return (out.reshape(b, -1, *head),)


def _alone(hows: tuple[NormRope, ...], joint: bool, each: tuple[Any, ...]) -> tuple[Array, ...]:
    found: Any = tuple(on_shard(how, *of) for how, of in zip(hows, each, strict=True))
    return (jnp.concatenate(found, axis=1),) if joint else found


_together.defvjp(
    lambda hows, joint, each: jax.vjp(partial(_alone, hows, joint), each),
    lambda hows, joint, pull, dy: pull(dy),
)


# ---- one device ----------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def on_shard(
    how: NormRope, x: Float[Array, "B T N H"], vectors: Vectors, tables: Tables
) -> Float[Array, "B T N H"]:
    """Norm and rotate what one device has; tables [B or 1, T, H/2]."""
    return _forward(how, x, vectors, tables)[0].reshape(x.shape)


def _forward(
    how: NormRope, x: Array, vectors: Vectors, tables: Tables, keep: bool = False
) -> list[Array]:
    launch = how.launch(x.dtype.itemsize, vectors)
    parts = tuple((_part(v),) for v in vectors.values())
    return call.forward(launch, ((_rows(x),),), parts, _lines(tables), keep)


def _on_shard_fwd(how: NormRope, x: Array, vectors: Vectors, tables: Tables) -> Any:
    # In a scan over layers XLA merges the projection's matmul with the store of its result for the
    # backward, and runs it once more for the kernel (jax 0.11.2). Not over a barrier.
    x = jax.lax.optimization_barrier(x)
    y, *r = _forward(how, x, vectors, tables, keep=True)
    return jax.lax.optimization_barrier(y.reshape(x.shape)), (x, tuple(r), vectors, tables)


def _on_shard_bwd(how: NormRope, kept: Any, dy: Array) -> tuple[Array, Vectors, Tables]:
    x, r, vectors, tables = kept
    launch = how.launch(x.dtype.itemsize, vectors, is_backward=True)
    parts = tuple(_part(v) for v in vectors.values())
    dx, sums = call.backward(launch, _rows(dy), _rows(x), r, parts, _lines(tables))
    found = {}
    for (name, v), total in zip(vectors.items(), sums, strict=True):
        by_head = total.reshape(x.shape[2:])
        found[name] = (by_head if len(v) > 1 else by_head.sum(0, keepdims=True)).astype(v.dtype)
    # Hardly anybody learns the angles: XLA drops this where nobody does.
    _, pull = jax.vjp(lambda tables: in_steps(launch.work, x, vectors, tables), tables)
    return dx.reshape(x.shape), found, pull(dy)[0]


on_shard.defvjp(_on_shard_fwd, _on_shard_bwd)


def _rows(x: Float[Array, "B T N H"]) -> Float[Array, "B T NH"]:
    return x.reshape(*x.shape[:2], -1)


def _part(vector: Float[Array, "#N H"]) -> Float[Array, "1 1 1 NH"]:
    return vector.reshape(1, 1, 1, -1)


def _lines(tables: Tables) -> Tables:
    return tuple(a.reshape(-1, a.shape[-1]) for a in tables)


def in_steps(
    work: RowWork, x: Float[Array, "B T N H"], vectors: Vectors, tables: Tables
) -> Float[Array, "B T N H"]:
    """Compute what the kernel computes, step by step."""
    z = jnp.asarray(x, jnp.float32) + vectors.get("bias", 0.0)
    if work.norm is not None:
        axes = (2, 3) if work.norm == "across" else 3
        r = jax.lax.rsqrt(jnp.mean(z * z, axes, keepdims=True) + work.eps)
        z = z * r * vectors.get("scale", 1.0)
    if work.style is not None:
        cos, sin = tables
        z = apply_rotary(z, Rotary(cos, sin, work.style))
    return z.astype(x.dtype)
