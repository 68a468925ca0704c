"""What self- and cross-attention share: projections with their places on a mesh, norms, heads, the
output.

It chooses no kernel: `maxattn.attention` does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.attention import attention, bind_mask
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.modules import checks
from maxattn.modules.heads import merge_heads, split_heads
from maxattn.modules.norm_rope import fused_row, norm_rotary, runs_here
from maxattn.modules.qk_norm import QKNorm, check_qk_norm, make_qk_norm, normalise
from maxattn.rope import Rotary, apply_rotary, as_rotary

Heads = Float[Array, "B T N H"]

KERNEL_INIT = nnx.initializers.lecun_normal()
BIAS_INIT = nnx.initializers.zeros_init()


class AttentionBase(nnx.Module):
    """Project to heads, attend, project back. `FlaxAttention` and `CrossAttention` say of what.

    Its parameters name mesh axes (kernels fsdp x tensor, output tensor x fsdp) without needing a
    mesh to be made.
    """

    role: ClassVar[Literal["self", "cross"]]
    diffusers_names: ClassVar[dict[str, str]] = {"to_out": "to_out.0"}

    def __init__(
        self,
        query_dim: int,
        kv_dim: int,
        heads: int,
        kv_heads: int | None,
        dim_head: int,
        dropout: float,
        bias: bool,
        out_bias: bool,
        qk_norm: str | None,
        eps: float,
        scale: float | None,
        out_dim: int | None,
        *,
        config: AttentionConfig | None,
        mesh: jax.sharding.Mesh | None,
        dtype: Any,
        param_dtype: Any,
        precision: Any,
        kernel_init: Callable[..., Array],
        bias_init: Callable[..., Array],
        rngs: nnx.Rngs,
    ) -> None:
        self.query_dim, self.out_dim = query_dim, query_dim if out_dim is None else out_dim
        self.heads, self.kv_heads, self.dim_head = (
            heads,
            heads if kv_heads is None else kv_heads,
            dim_head,
        )
        self.qk_norm, self.eps, self.scale = qk_norm, eps, checks.scale(scale)
        self.config, self.mesh = config, mesh
        self._check(dropout, dtype, param_dtype, precision)
        checks.parameter_rngs(rngs)
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        linear = partial(linear_on_mesh, kernel_init=kernel_init, bias_init=bias_init, **how)
        inner, kv_inner = self.heads * dim_head, self.kv_heads * dim_head
        self.to_q: nnx.Linear = linear(query_dim, inner, bias, ("fsdp", "tensor"), rngs=rngs)
        self.to_k: nnx.Linear = linear(kv_dim, kv_inner, bias, ("fsdp", "tensor"), rngs=rngs)
        self.to_v: nnx.Linear = linear(kv_dim, kv_inner, bias, ("fsdp", "tensor"), rngs=rngs)
        self.to_out: nnx.Linear = linear(
            inner, self.out_dim, out_bias, ("tensor", "fsdp"), rngs=rngs
        )
        self.norm_q = self._norm(self.heads, param_dtype, rngs)
        self.norm_k = self._norm(self.kv_heads, param_dtype, rngs)
        self.dropout = nnx.Dropout(dropout, deterministic=True)

    def _check(self, dropout: float, dtype: Any, param_dtype: Any, precision: Any) -> None:
        for setting in ("query_dim", "dim_head", "out_dim"):
            checks.positive(setting, getattr(self, setting))
        checks.head_counts(self.heads, self.kv_heads)
        checks.dropout_rate(dropout)
        checks.epsilon(self.eps)
        checks.config(self.config)
        checks.mesh(self.mesh)
        check_qk_norm(self.qk_norm)
        checks.dtype("dtype", dtype, optional=True)
        checks.dtype("param_dtype", param_dtype)
        checks.precision(precision)

    def _norm(self, heads: int, param_dtype: Any, rngs: nnx.Rngs) -> QKNorm | None:
        norm = make_qk_norm(
            self.qk_norm, heads, self.dim_head, self.eps, param_dtype=param_dtype, rngs=rngs
        )
        return nnx.data(norm)

    def _check_attention(self, batch: int, q_len: int, kv_len: int, mask: Any, bias: Any) -> None:
        """Refuse a mask, a bias or surroundings that do not fit before anything is projected."""
        sharding.check_surrounding(self.mesh)
        q = jax.ShapeDtypeStruct((batch, q_len, self.heads, self.dim_head), jnp.float32)
        k = jax.ShapeDtypeStruct((batch, kv_len, self.kv_heads, self.dim_head), jnp.float32)
        bound = bind_mask(mask, q, k, self.config or AttentionConfig())  # type: ignore[arg-type]
        Call.of(q, k, bound, bias, self.scale, self.role)

    def _check_rotary(self, rotary: Any, batch: int, length: int, name: str) -> Rotary | None:
        return (
            None
            if rotary is None
            else as_rotary(rotary, (batch, length, self.heads, self.dim_head), name)
        )

    # ---- the steps of a call ---------------------------------------------------------------------

    def _scope(self, name: str) -> AbstractContextManager[Any]:
        named = self.config is not None and self.config.enable_jax_named_scopes
        return jax.named_scope(f"maxattn/{name}") if named else nullcontext()

    def _project(self, x: Array, linear: nnx.Linear, name: str) -> Float[Array, "B T NH"]:
        with self._scope("to_qkv"):
            return checkpoint_name(linear(x), name)

    def _turned_heads(
        self,
        x: Array,
        linear: nnx.Linear,
        name: str,
        heads: int,
        norm: QKNorm | None,
        rotary: Rotary | None,
        letters: str = "BTNH",
    ) -> Heads:
        """Project to queries or keys, norm them and turn them: in one kernel where there is one."""
        row = fused_row(self.qk_norm, norm, rotary, heads, self.dim_head)
        if row is None or not runs_here(row, x, self.mesh, letters):
            return self._rotate(self._to_heads(self._project(x, linear, name), heads, norm), rotary)
        with self._scope("to_qkv"):
            y, bias = without_bias(linear, x)
            y = checkpoint_name(y, name)
        with self._scope("norm_rope"):
            return norm_rotary(row, y, bias, norm, rotary, self.mesh, letters)

    def _to_heads(self, x: Float[Array, "B T NH"], heads: int, norm: QKNorm | None = None) -> Heads:
        """Norm and split: across heads before the split, per head after it."""
        with self._scope("norm"):
            if self.qk_norm == "rms_norm_across_heads":
                return split_heads(normalise(norm, x), heads)
            return normalise(norm, split_heads(x, heads))

    def _rotate(self, x: Heads, rotary: Rotary | None) -> Heads:
        if rotary is None:
            return x
        with self._scope("rope"):
            return apply_rotary(x, rotary)

    def _queries(self, hidden_states: Array, rotary: Rotary | None) -> Heads:
        q = self._turned_heads(
            hidden_states, self.to_q, "query_proj", self.heads, self.norm_q, rotary
        )
        return sharding.constrain(q, self.mesh, "BTNH")

    def _attend(self, q: Heads, k: Heads, v: Heads, mask: Any = None, bias: Any = None) -> Heads:
        return attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            scale=self.scale,
            config=self.config,
            mesh=self.mesh,
            role=self.role,
        )

    def _output(
        self, out: Heads, deterministic: bool | None, rngs: Any
    ) -> Float[Array, "B T out_dim"]:
        with self._scope("to_out"):
            y = self.to_out(checkpoint_name(merge_heads(out), "attn_output"))
        y = sharding.constrain(y, self.mesh, "BT.")
        return self.dropout(y, deterministic=deterministic, rngs=rngs)


def linear_on_mesh(
    width_in: int, width_out: int, bias: bool, axes: tuple[str, str], *, rngs: nnx.Rngs, **how: Any
) -> nnx.Linear:
    """Build a projection whose kernel [in, out] names its mesh axes; its bias is split only where
    the heads are.
    """
    # Without eager_sharding=False, naming axes would ask for a mesh when the parameter is made.
    kernel = {"out_sharding": axes, "eager_sharding": False}
    bias_axis = axes[1] if axes[1] == "tensor" else None
    return nnx.Linear(
        width_in,
        width_out,
        use_bias=bias,
        rngs=rngs,
        kernel_metadata=kernel,
        bias_metadata={"out_sharding": (bias_axis,), "eager_sharding": False},
        **how,
    )


@jax.custom_jvp
def apart(x: Array) -> Array:
    """Return x for readers whose gradients are summed first; project it once more after them, from
    x itself.

    Then each sum is of a matmul's result and of what there is already, in this order, and XLA lets
    cuBLASLt add it where the matmul writes: three projections of one x need no pass that adds their
    gradients.
    """
    return x


@apart.defjvp
def _apart_tangent(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The tangent alone is another variable: of x itself a scan over layers would keep two.
    (x,), (t,) = primals, tangents
    return x, jax.lax.reshape(jax.lax.reshape(t, (1, *t.shape)), t.shape)


def without_bias(linear: nnx.Linear, x: Array) -> tuple[Array, Array | None]:
    """Project without adding the bias, and return it beside; None where it is in the result or
    there is none.
    """
    if (
        type(linear) is not nnx.Linear
        or linear.bias is None
        or linear.preferred_element_type is not None
    ):
        return linear(x), None
    bias = linear.bias.get_value()
    x, kernel, _ = linear.promote_dtype((x, linear.kernel.get_value(), bias), dtype=linear.dtype)
    over_channels = (((x.ndim - 1,), (0,)), ((), ()))
    return linear.dot_general(x, kernel, over_channels, precision=linear.precision), bias
