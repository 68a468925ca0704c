"""Self-attention: `FlaxAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.modules import checks
from maxattn.modules.base import (
    BIAS_INIT,
    KERNEL_INIT,
    AttentionBase,
    Build,
    ModuleSizes,
    Projection,
)
from maxattn.modules.explicit import like_states_without_cache, over_explicit_axes
from maxattn.modules.with_cache import run_with_cache
from maxattn.rope import Rotary
from maxattn.streaming import CacheLayer, KVCache


class FlaxAttention(AttentionBase):
    """Attend from every token of a sequence to every token that the mask allows.

    y = to_out(softmax(scale * rope(norm_q(to_q x)) rope(norm_k(to_k x))^T + bias) to_v x)

    Args:
        query_dim: channels of the input.
        heads: N, query heads; default 8.
        kv_heads: K, key and value heads; default N. N / K neighbouring query heads share each.
        dim_head: H, channels of a head; default 64.
        dropout: probability that an output channel is dropped; default 0.
        bias: whether to_q, to_k and to_v have a bias; default False.
        out_bias: whether to_out has a bias; default True.
        qk_norm: norm of queries and keys. "rms_norm", "layer_norm" and "zero_centred_rms_norm"
            (times 1 + scale) are over each head, "rms_norm_across_heads" is over all heads of a
            token; default None.
        eps: epsilon of the norms of queries and keys; default 1e-5 (Wan has 1e-6).
        scale: multiplies the scores; default H ** -0.5.
        out_dim: channels of the output; default query_dim.
        out_proj: whether there is an output projection; default True. If False, the output is the
            joined heads, [B, T, N*H], for models that project them with other channels.
        gate: before to_out, "per_head" multiplies each head by 2 sigmoid(to_gate_logits x), and
            "per_channel" multiplies each channel by sigmoid(to_gate x); default None.
        dim_head_v: V, channels of a value head; default H. If V is not H, every kernel but
            `dot_product` pads the narrower heads with zeros.
        config: kernel and parallelism; default `AttentionConfig()`.
        mesh: device mesh that the call is sharded over; default none.
        dtype: computation dtype; default the common dtype of input and parameters.
        param_dtype: dtype of the parameters; default float32.
        precision: matmul precision of the projections, as in `jax.lax.Precision`.
        kernel_init, bias_init: initialisers; default LeCun normal and zeros.
        rngs: source of the initial parameters.

    Raises:
        InputError: if kv_heads does not divide heads, or a value is out of range.

    Source: Vaswani et al., Attention is all you need, https://arxiv.org/abs/1706.03762

    >>> config = ma.AttentionConfig(attention="dot_product")
    >>> layer = ma.FlaxAttention(64, heads=4, dim_head=16, config=config, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 10, 64)), rotary_emb=ma.rope_1d(16, length=10)).shape
    (1, 10, 64)
    """

    role: ClassVar[Literal["self", "cross"]] = "self"

    @answers_names
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
        super().__init__(ModuleSizes.of(locals()), Build.of(locals()), config, mesh)

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
    @answers_names
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
        """Attend within a sequence, or from a block of a `Stream` to the frames in its cache.

        Args:
            hidden_states: [B, T, query_dim].
            rotary_emb: rotary embedding of the queries, in any form that
                `maxattn.rope.apply_rotary` takes; default none. If the cache has
                positions="slots", the rotary embedding of all slots of the window.
            mask: a mask of `maxattn.masks`; default all pairs.
            bias: added to the scores; each axis of [B, N, T, T] is full or 1.
            deterministic: False drops output channels at random. The default is the mode that
                train() or eval() set last, and as in `nnx.Dropout` False if neither was called.
            rngs: random source of the dropout.
            rotary_emb_k: rotary embedding of the keys; default rotary_emb.
            cache: `kv_cache.layer(i)`, which keys and values of these tokens are written into.

        Returns:
            [B, T, out_dim]; with a cache, the pair of this output and the changed cache.

        Raises:
            InputError: if shapes or dtypes do not fit, or if there is dropout without rngs.
            MeshError: if the cache is on another mesh.
            Unsupported: if a pass that writes into a cache is differentiated.
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
        prepared = self._prepare(b, t, hidden_states, mask, bias)
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
        q, k = self._project(x, to_q), self._project(x, to_k)
        v = self._project(x, Projection(self.to_v, "value_proj", self.kv_heads))
        return self._on_mesh(q, "BTNH"), self._on_mesh(k, "BSKH"), self._on_mesh(v, "BSKH")
