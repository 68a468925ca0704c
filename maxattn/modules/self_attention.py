"""Self-attention: `FlaxAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.config import AttentionConfig
from maxattn.modules import checks
from maxattn.modules.base import (
    BIAS_INIT,
    KERNEL_INIT,
    AttentionBase,
    Build,
    Projection,
)
from maxattn.modules.explicit import like_states_without_cache, over_explicit_axes
from maxattn.modules.with_cache import run_with_cache
from maxattn.rope import Rotary
from maxattn.streaming import CacheLayer, KVCache


class FlaxAttention(AttentionBase):
    """Attend from every token to every token that the mask allows.

    y = to_out(softmax(scale * rope(norm_q(to_q x)) rope(norm_k(to_k x))^T + bias) to_v x)

    Args:
        query_dim: channels of the input.
        heads: N, query heads; default 8.
        kv_heads: K, key heads, dividing N; default N. Neighbouring query heads share a key head.
        dim_head: H, channels of a head; default 64.
        dropout: probability of dropping an output channel; default 0.
        bias: whether to_q, to_k and to_v have a bias; default False.
        out_bias: whether to_out has one; default True.
        qk_norm: None, "rms_norm", "layer_norm" or "zero_centred_rms_norm" (per head; the last keeps
            its scale less 1), or "rms_norm_across_heads"; default None.
        eps: of both norms; default 1e-5 (Wan has 1e-6).
        scale: multiplies the scores; default H ** -0.5.
        out_dim: channels of the output; default query_dim.
        out_proj: whether there is an output projection; default True. False leaves the heads
            joined, [B, T, N*H], for models that project them with other channels.
        gate: None, "per_head" (heads times 2 sigmoid(to_gate_logits x)) or "per_channel" (channels
            times sigmoid(to_gate x)), before to_out; default None.
        dim_head_v: V, channels of a head of the values; default H. Kernels but `dot_product` pad
            both to the larger.
        config: which kernel and parallelism; default `AttentionConfig()`.
        mesh: devices to spread over; default none.
        dtype: of the computation; default that of input and parameters together.
        param_dtype: of the parameters; default float32.
        precision: of the projections' matmuls, as `jax.lax.Precision`.
        kernel_init, bias_init: initialisers; default LeCun normal and zeros.
        rngs: source of the initial parameters.

    Raises:
        InputError: for sizes that do not divide, or a value out of range.

    Source: Vaswani et al., Attention is all you need, https://arxiv.org/abs/1706.03762

    >>> config = ma.AttentionConfig(attention="dot_product")
    >>> layer = ma.FlaxAttention(64, heads=4, dim_head=16, config=config, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 10, 64)), rotary_emb=ma.rope_1d(16, length=10)).shape
    (1, 10, 64)
    """

    role: ClassVar[Literal["self", "cross"]] = "self"

    def __init__(
        self,
        query_dim: int,
        heads: int = 8,
        kv_heads: int | None = None,
        dim_head: int = 64,
        dropout: float = 0.0,
        bias: bool = False,
        out_bias: bool = True,
        qk_norm: str | None = None,
        eps: float = 1e-5,
        scale: float | None = None,
        out_dim: int | None = None,
        *,
        out_proj: bool = True,
        gate: str | None = None,
        dim_head_v: int | None = None,
        config: AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Callable[..., Array] = KERNEL_INIT,
        bias_init: Callable[..., Array] = BIAS_INIT,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = query_dim, query_dim, heads, kv_heads, dim_head, out_dim, dim_head_v
        options = dropout, bias, out_bias, qk_norm, eps, scale, out_proj, gate
        build = Build(dtype, param_dtype, precision, kernel_init, bias_init, rngs)
        super().__init__(*sizes, *options, build, config, mesh)

    @overload
    def __call__(
        self,
        hidden_states: Float[Array, "B T query_dim"],
        rotary_emb: Any = None,
        mask: Any = None,
        bias: Float[Array, "#B #N #T #T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        rotary_emb_k: Any = None,
        cache: None = None,
    ) -> Float[Array, "B T out_dim"]: ...
    @overload
    def __call__(
        self,
        hidden_states: Float[Array, "B T query_dim"],
        rotary_emb: Any = None,
        mask: Any = None,
        bias: Float[Array, "#B #N #T #T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        rotary_emb_k: Any = None,
        cache: CacheLayer,
    ) -> tuple[Float[Array, "B T out_dim"], KVCache]: ...
    @over_explicit_axes(like_states_without_cache)
    def __call__(
        self,
        hidden_states: Float[Array, "B T query_dim"],
        rotary_emb: Any = None,
        mask: Any = None,
        bias: Float[Array, "#B #N #T #T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        rotary_emb_k: Any = None,
        cache: CacheLayer | None = None,
    ) -> Any:
        """Attend within one sequence, or from a block of a stream to what its cache keeps.

        Args:
            hidden_states: [B, T, query_dim].
            rotary_emb: positions of the queries, as `maxattn.rope.apply_rotary` takes them; default
                none. Beside a cache that keeps keys by slots, a table of the whole window.
            mask: a mask of `maxattn.masks`; default everything.
            bias: added to the scores, each axis of [B, N, T, T] full or 1.
            deterministic: False drops output channels at random; default what the module's train()
                or eval() set last, and True before.
            rngs: source of the dropout, needed only then.
            rotary_emb_k: positions of the keys; default those of the queries.
            cache: a layer of a `KVCache`: the keys and values of these tokens are written into the
                slots of the block that it is at. Then the result is a pair (output, cache). A mask
                stands beside one that extracts, or is read alone.

        Raises:
            InputError: for shapes or dtypes that do not fit, or dropout without rngs.
            MeshError: the cache lies on another mesh.
            Unsupported: a pass that writes into a cache is differentiated.
        """
        checks.states("hidden_states", hidden_states, self.query_dim, "query_dim")
        checks.dropout_rngs(self.dropout, deterministic, rngs)
        if cache is not None:
            angles = rotary_emb, rotary_emb_k
            out, whole = run_with_cache(self, hidden_states, cache, *angles, mask, bias)
            return self._output(out, hidden_states, deterministic, rngs), whole
        b, t, _ = hidden_states.shape
        rotary_q = self._check_rotary(rotary_emb, b, t, "rotary_emb")
        of_keys = rotary_emb if rotary_emb_k is None else rotary_emb_k
        rotary_k = self._check_rotary(of_keys, b, t, "rotary_emb_k", self.kv_heads)
        prepared = self._prepare(b, t, t, mask, bias)
        to = self._queries_and_keys(hidden_states, rotary_q, rotary_k)
        q, k, v = self._heads(hidden_states, *to)
        out = self._run_attention(self._noted(prepared, to[0]), q, k, v, bias)
        return self._output(out, hidden_states, deterministic, rngs)

    def _queries_and_keys(
        self, x: Array, rotary_q: Rotary | None, rotary_k: Rotary | None
    ) -> tuple[Projection, Projection]:
        to_q = self._projection("query_proj", x, self.to_q, self.norm_q, rotary_q)
        return to_q, self._projection("key_proj", x, self.to_k, self.norm_k, rotary_k, "BSKH")

    def _heads(self, x: Array, to_q: Projection, to_k: Projection) -> tuple[Array, Array, Array]:
        """Project to queries, keys and values."""
        q, k = self._project(x, to_q), self._project(x, to_k)
        v = self._project(x, Projection(self.to_v, "value_proj", self.kv_heads))
        return self._on_mesh(q, "BTNH"), self._on_mesh(k, "BSKH"), self._on_mesh(v, "BSKH")
