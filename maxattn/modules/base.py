"""The common part of the attention modules: projections, norms, heads and the output.

The kernel is chosen by `maxattn.attention`, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn._attention import Prepared, attend, prepare
from maxattn.config import AttentionConfig
from maxattn.config.asked import checked_config
from maxattn.masks.operands import check_finite
from maxattn.modules import checks
from maxattn.modules.heads import merge_heads, split_heads
from maxattn.modules.norm_rope import NormRope, decide, norm_rotary
from maxattn.modules.qk_norm import QK_NORMS, QKNorm, make_qk_norm, normalise
from maxattn.rope import Rotary, apply_rotary, as_rotary
from maxattn.target import Target

Heads = Float[Array, "B T N H"]

GATES = ("per_head", "per_channel")
KERNEL_INIT = nnx.initializers.lecun_normal()
BIAS_INIT = nnx.initializers.zeros_init()
IN, OUT = ("fsdp", "tensor"), ("tensor", "fsdp")
"""Mesh axes of weights [in, out]: IN for projections to heads, OUT for projections from heads."""


class ModuleSizes(NamedTuple):
    """Arguments of a module's constructor, under its names; `kv_dim` None is query_dim."""

    query_dim: int
    heads: int
    kv_heads: int | None
    dim_head: int
    out_dim: int | None
    dim_head_v: int | None
    dropout: float
    bias: bool
    out_bias: bool
    qk_norm: str | None
    eps: float
    scale: float | None
    out_proj: bool
    gate: str | None = None
    kv_dim: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Take the fields from the local variables of a constructor."""
        return cls(**{name: given[name] for name in cls._fields if name in given})


class Build(NamedTuple):
    """Arguments of `nnx.Linear` that all projections of a module share."""

    dtype: Any
    param_dtype: Any
    precision: Any
    kernel_init: Callable[..., Array]
    bias_init: Callable[..., Array]
    rngs: nnx.Rngs

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Take the fields from the local variables of a constructor."""
        return cls(*(given[name] for name in cls._fields))


class Projection(NamedTuple):
    """One projection to heads, and the norm and rotary embedding after it."""

    linear: nnx.Linear
    name: str  # checkpoint name of the result, for remat policies
    heads: int  # N for queries, K for keys and values
    # norm, rotary: norm and rotary embedding of the result; default None, for neither
    norm: QKNorm | None = None
    rotary: Rotary | None = None
    letters: str = "BTNH"  # axis letters of the result, for its sharding
    how: NormRope = NormRope()  # whether one kernel or XLA computes norm and rotary embedding


class AttentionBase(nnx.Module):
    """Base class of the attention modules: project to heads, attend, and project back.

    Weights are annotated with the mesh axes that they are sharded over: (fsdp, tensor), and
    (tensor, fsdp) for the output projection. A module can be built without a mesh.
    """

    role: ClassVar[Literal["self", "cross"]]
    audit_name = ""  # an audit names the modules of its own copy of a model
    diffusers_names: ClassVar[dict[str, str]] = {"to_out": "to_out.0"}
    diffusers_may_fuse: ClassVar[dict[str, tuple[str, ...]]] = {
        "to_qkv": ("to_q", "to_k", "to_v"),
        "to_kv": ("to_k", "to_v"),
        "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
        "to_added_kv": ("add_k_proj", "add_v_proj"),
    }

    def __init__(
        self,
        sizes: ModuleSizes,
        build: Build,
        config: AttentionConfig | None,
        mesh: jax.sharding.Mesh | None,
    ) -> None:
        query_dim, heads, dim_head = sizes.query_dim, sizes.heads, sizes.dim_head
        self.query_dim, self.heads, self.dim_head = query_dim, heads, dim_head
        self.dim_head_v = dim_head if sizes.dim_head_v is None else sizes.dim_head_v
        self.kv_heads = heads if sizes.kv_heads is None else sizes.kv_heads
        self.out_proj, self.gate = sizes.out_proj, sizes.gate
        if self.out_proj:
            self.out_dim = query_dim if sizes.out_dim is None else sizes.out_dim
        else:
            for setting in ("heads", "dim_head", "dim_head_v"):
                checks.positive(setting, getattr(self, setting))
            checks.channels_of_heads(sizes.out_dim, heads * self.dim_head_v)
            self.out_dim = heads * self.dim_head_v
        self.qk_norm, self.eps, self.scale = sizes.qk_norm, sizes.eps, checks.scale(sizes.scale)
        self.config, self.mesh = config, mesh
        self._check(sizes.dropout, build)
        kv_dim, bias = query_dim if sizes.kv_dim is None else sizes.kv_dim, sizes.bias
        joined = heads * self.dim_head_v
        self.to_q = linear_on_mesh(query_dim, heads * dim_head, bias, IN, build)
        self.to_k, self.to_v = self._to_keys_and_values(kv_dim, bias, build)
        if self.out_proj:
            self.to_out = linear_on_mesh(joined, self.out_dim, sizes.out_bias, OUT, build)
        if self.gate == "per_head":
            self.to_gate_logits = linear_on_mesh(query_dim, heads, True, IN, build)
        if self.gate == "per_channel":
            self.to_gate = linear_on_mesh(query_dim, joined, bias, IN, build)
        self.norm_q = self._norm(heads, build)
        self.norm_k = self._norm(self.kv_heads, build)
        self.dropout = nnx.Dropout(sizes.dropout, deterministic=False)

    def _check(self, dropout: float, build: Build) -> None:
        for setting in ("query_dim", "dim_head", "dim_head_v", "out_dim"):
            checks.positive(setting, getattr(self, setting))
        checks.head_counts(self.heads, self.kv_heads)
        checks.dropout_rate(dropout)
        checks.epsilon(self.eps)
        checked_config(self.config)
        checks.mesh(self.mesh)
        checks.optional_name("qk_norm", self.qk_norm, QK_NORMS)
        checks.optional_name("gate", self.gate, GATES)
        checks.flag("out_proj", self.out_proj)
        checks.dtype("dtype", build.dtype, optional=True)
        checks.dtype("param_dtype", build.param_dtype)
        checks.precision(build.precision)
        checks.parameter_rngs(build.rngs)

    def _to_keys_and_values(
        self, width: int, bias: bool, build: Build
    ) -> tuple[nnx.Linear, nnx.Linear]:
        inner, v_inner = self.kv_heads * self.dim_head, self.kv_heads * self.dim_head_v
        to_k = linear_on_mesh(width, inner, bias, IN, build)
        return to_k, linear_on_mesh(width, v_inner, bias, IN, build)

    def _norm(self, heads: int, build: Build) -> QKNorm | None:
        how: dict[str, Any] = {"param_dtype": build.param_dtype, "rngs": build.rngs}
        return nnx.data(make_qk_norm(self.qk_norm, heads, self.dim_head, self.eps, **how))

    # ---- before anything is projected ------------------------------------------------------------

    def _prepare(
        self, batch: int, q_len: int, keys: Any, mask: Any = None, bias: Any = None
    ) -> Prepared:
        """Check a call's shapes and bind its mask; `keys` are states, or (keys, values)."""

        def shape(length: int, heads: int, dim: int) -> Any:
            # The dtype is known once the projections have run: `_run_attention` sets it.
            return jax.ShapeDtypeStruct((batch, length, heads, dim), jnp.float32)

        k, v = keys if isinstance(keys, tuple) else (keys, keys)
        operands = (
            shape(q_len, self.heads, self.dim_head),
            shape(k.shape[1], self.kv_heads, self.dim_head),
            shape(v.shape[1], self.kv_heads, self.dim_head_v),
        )
        return prepare(*operands, mask, bias, self.scale, self.config, self.mesh, self.role)

    def _check_rotary(
        self, rotary: Any, batch: int, length: int, name: str, heads: int = 0
    ) -> Rotary | None:
        """Read a rotary table, and check that it fits the queries, or keys with `heads` heads."""
        if rotary is None:
            return None
        table = as_rotary(rotary, (batch, length, heads or self.heads, self.dim_head), name)
        if self.config is not None and self.config.check_finite:
            check_finite({f"{name} {x}": jnp.asarray(getattr(table, x)) for x in ("cos", "sin")})
        return table

    # ---- the steps of a call ---------------------------------------------------------------------

    def _scope(self, name: str) -> AbstractContextManager[Any]:
        named = self.config is not None and self.config.enable_jax_named_scopes
        return jax.named_scope(f"maxattn/{name}") if named else nullcontext()

    def _projection(
        self,
        name: str,
        x: Array,
        linear: nnx.Linear,
        norm: QKNorm | None,
        rotary: Rotary | None,
        letters: str = "BTNH",
    ) -> Projection:
        """Decide, once per call, how queries or keys are normalised and rotated."""
        heads = self.heads if name == "query_proj" else self.kv_heads
        sizes = heads, self.dim_head, self.mesh, letters
        how = decide(Target.here(), x, self.qk_norm, norm, rotary, *sizes)
        return Projection(linear, name, heads, norm, rotary, letters, how)

    def _noted(self, prepared: Prepared, to: Projection) -> Prepared:
        notes = (to.how.note,) if to.how.note else ()
        return prepared._replace(notes=notes, rotary=to.rotary)

    def _project(self, x: Array, to: Projection) -> Heads:
        """Project to heads, normalise and rotate; the steps after the matmul are rounded once."""
        if to.how.work is not None:
            with self._scope("to_qkv"):
                y, bias = without_bias(to.linear, x)
                y = checkpoint_name(y, to.name)
            with self._scope("norm_rope"):
                return norm_rotary(to.how, y, bias, to.norm, to.rotary, self.mesh, to.letters)
        with self._scope("to_qkv"):
            y = checkpoint_name(to.linear(x), to.name)
        with self._scope("norm"):
            if self.qk_norm == "rms_norm_across_heads":
                z = split_heads(normalise(to.norm, y), to.heads)
            else:
                z = normalise(to.norm, split_heads(y, to.heads))
        if to.rotary is not None:
            with self._scope("rope"):
                z = apply_rotary(z, to.rotary)
        return z.astype(y.dtype)

    def _on_mesh(self, x: Array, letters: str) -> Array:
        return sharding.constrain(x, self.mesh, letters)

    def _run_attention(
        self, prepared: Prepared, q: Heads, k: Heads, v: Heads, bias: Any = None
    ) -> Heads:
        checks.computation_dtype(jnp.result_type(q, k, v))
        call = prepared.call.of_dtype(q, k, v)
        return attend(prepared._replace(call=call, name=self.audit_name), q, k, v, bias)[0]

    def _output(
        self, out: Heads, x: Array, deterministic: bool | None, rngs: Any
    ) -> Float[Array, "B T out_dim"]:
        """Gate the heads by the input x, project them to out_dim channels, and apply dropout."""
        out = self._gated(checkpoint_name(merge_heads(out), "attn_output"), x)
        if self.out_proj:
            with self._scope("to_out"):
                out = self.to_out(out)
        y = self._on_mesh(out, "BT." if self.out_proj else "BTN")
        return self.dropout(y, deterministic=deterministic, rngs=rngs)

    def _gated(self, out: Float[Array, "B T NH"], x: Array) -> Float[Array, "B T NH"]:
        if self.gate is None:
            return out
        with self._scope("to_gate"):
            if self.gate == "per_channel":
                return out * jax.nn.sigmoid(self.to_gate(x))
            gates = 2.0 * jax.nn.sigmoid(self.to_gate_logits(x))
            # [B, T, N, H] * [B, T, N, 1]
            return merge_heads(split_heads(out, self.heads) * gates[..., None])


def linear_on_mesh(
    width_in: int, width_out: int, bias: bool, axes: tuple[str, str], build: Build
) -> nnx.Linear:
    """Build a projection whose weights [in, out] and bias are annotated with mesh axes."""
    bias_axis = axes[1] if axes[1] == "tensor" else None
    return nnx.Linear(
        width_in,
        width_out,
        use_bias=bias,
        kernel_metadata=sharding.on_axes(*axes, dims=(width_in, width_out)),
        bias_metadata=sharding.on_axes(bias_axis, dims=(width_out,)),
        **build._asdict(),
    )


def without_bias(linear: nnx.Linear, x: Array) -> tuple[Array, Array | None]:
    """Return the projection of x, and the bias that is left to add; None if there is none."""
    plain = type(linear) is nnx.Linear and linear.preferred_element_type is None
    if not plain or linear.bias is None:
        return linear(x), None
    bias = linear.bias.get_value()
    x, kernel, _ = linear.promote_dtype((x, linear.kernel.get_value(), bias), dtype=linear.dtype)
    over_channels = (((x.ndim - 1,), (0,)), ((), ()))
    return linear.dot_general(x, kernel, over_channels, precision=linear.precision), bias
