"""Joint attention: `JointAttention`, two sequences with their own projections, as in Flux."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.modules import checks
from maxattn.modules.base import (
    BIAS_INIT,
    IN,
    KERNEL_INIT,
    OUT,
    AttentionBase,
    Build,
    ModuleSizes,
    Projection,
    linear_on_mesh,
    without_bias,
)
from maxattn.modules.explicit import like_both, like_both_without_bias, over_explicit_axes
from maxattn.modules.heads import merge_heads
from maxattn.modules.self_attention import FlaxAttention
from maxattn.rope import Rotary

Unbiased = tuple[Float[Array, "B T C"], Float[Array, " C"] | None]
"""The result of a projection without its bias, and the bias."""


class JointAttention(FlaxAttention):
    """Attend from every token of a text and a picture to every token of both, as Flux does.

    q = [norm_added_q(add_q_proj text), norm_q(to_q x)]; k and v alike
    [text', x'] = softmax(scale * rope(q) rope(k)^T + bias) v
    y = to_out x'; text_y = to_add_out text'

    The text precedes the picture in the joint sequence, and in rotary embeddings, masks and biases.

    Args:
        query_dim: channels of the picture's tokens.
        heads, kv_heads, dim_head, dim_head_v, bias, out_bias, qk_norm, eps, scale, out_dim: as in
            `FlaxAttention`.
        dropout: as in `FlaxAttention`; applied to the picture's output alone, as in diffusers.
        added_kv_proj_dim: channels of the text's tokens, in and out; default query_dim.
        added_proj_bias: whether the text's three projections have a bias; default True.
        out_proj: whether there are output projections; default True. If False, the outputs are the
            joined heads, [B, T, N*H] and [B, S, N*H].
        text_out: whether the text has an output; default True. If False, as in the last block of
            SD3, there is no to_add_out, and the text's output is None.
        config, mesh, dtype, param_dtype, precision, kernel_init, bias_init, rngs: as in
            `FlaxAttention`.

    Raises:
        InputError: if kv_heads does not divide heads, or a value is out of range.

    Source: Esser et al., Scaling rectified flow transformers, https://arxiv.org/abs/2403.03206

    >>> layer = ma.JointAttention(64, 32, heads=4, dim_head=16, rngs=nnx.Rngs(0))
    >>> picture, text = layer(jnp.ones((1, 10, 64)), jnp.ones((1, 7, 32)))
    >>> picture.shape, text.shape
    ((1, 10, 64), (1, 7, 32))
    """

    @answers_names
    def __init__(
        self,
        query_dim: int,
        added_kv_proj_dim: int | None = None,
        heads: int = 8,
        kv_heads: int | None = None,
        dim_head: int = 64,
        dropout: float = 0.0,
        bias: bool = False,
        added_proj_bias: bool = True,
        out_bias: bool = True,
        qk_norm: str | None = None,
        eps: float = 1e-5,
        scale: float | None = None,
        out_dim: int | None = None,
        *,
        out_proj: bool = True,
        text_out: bool = True,
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
        sizes, build = ModuleSizes.of(locals()), Build.of(locals())
        checks.flag("text_out", text_out)
        self.text_out = text_out
        AttentionBase.__init__(self, sizes, build, config, mesh)
        width = query_dim if added_kv_proj_dim is None else added_kv_proj_dim
        checks.positive("added_kv_proj_dim", width)
        self.added_kv_proj_dim, bias = width, added_proj_bias
        self.add_q_proj = linear_on_mesh(width, heads * dim_head, bias, IN, build)
        self.add_k_proj, self.add_v_proj = self._to_keys_and_values(width, bias, build)
        if self.out_proj and self.text_out:
            self.to_add_out = linear_on_mesh(heads * self.dim_head_v, width, out_bias, OUT, build)
        self.norm_added_q = self._norm(self.heads, build)
        self.norm_added_k = self._norm(self.kv_heads, build)

    @answers_names
    @over_explicit_axes(like_both)
    def __call__(  # type: ignore[override]
        self,
        hidden_states: Float[Array, "B T query_dim"],
        encoder_hidden_states: Float[Array, "B S added_kv_proj_dim"],
        rotary_emb: Any = None,
        mask: Any = None,
        bias: Float[Array, "#B #N #ST #ST"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T out_dim"], Any]:
        """Attend jointly over both sequences.

        Args:
            hidden_states: the picture's tokens, [B, T, query_dim].
            encoder_hidden_states: the text's tokens, [B, S, added_kv_proj_dim].
            rotary_emb: rotary embedding of all S + T tokens, in any form that
                `maxattn.rope.apply_rotary` takes; default none.
            mask: over the S + T tokens, from `maxattn.masks`; default all pairs.
            bias: added to the scores; each axis of [B, N, S + T, S + T] is full or 1.
            deterministic, rngs: as in a call of `FlaxAttention`.

        Returns:
            The picture's output [B, T, out_dim], and the text's [B, S, added_kv_proj_dim] or None.

        Raises:
            InputError: if shapes or dtypes do not fit, or if there is dropout without rngs.
        """
        checks.dropout_rngs(self.dropout, deterministic, rngs)
        x, text = hidden_states, encoder_hidden_states
        of_text, of_picture = self._attend(text, x, rotary_emb, mask, bias)
        picture = self._output(of_picture, x, deterministic, rngs)
        if not self.text_out:
            return picture, None
        y, left = self._unbiased(of_text, "to_add_out", "B.")
        return picture, y if left is None else y + left.astype(y.dtype).reshape(1, 1, -1)

    @over_explicit_axes(like_both_without_bias)
    def without_out_bias(
        self,
        hidden_states: Float[Array, "B T query_dim"],
        encoder_hidden_states: Float[Array, "B S added_kv_proj_dim"],
        rotary_emb: Any = None,
    ) -> tuple[Unbiased, Any]:
        """Attend as a call does, but without adding the biases of the output projections.

        If the caller adds the biases together with the residual, such as in `adaptive_norm`, XLA
        on GPUs copies neither sequence out of the joint one. Dropout is not applied.

        Args:
            hidden_states, encoder_hidden_states, rotary_emb: as for a call.

        Returns:
            (y, bias) of the picture, and of the text or None. A bias is None if the projection has
            none.
        """
        x, text = hidden_states, encoder_hidden_states
        of_text, of_picture = self._attend(text, x, rotary_emb)
        picture = self._unbiased(of_picture, "to_out", "BT")
        return picture, self._unbiased(of_text, "to_add_out", "B.") if self.text_out else None

    def _unbiased(self, out: Float[Array, "B T N H"], name: str, letters: str) -> Unbiased:
        y, bias = merge_heads(out), None
        if self.out_proj:
            with self._scope(name):
                y, bias = without_bias(getattr(self, name), y)
        return self._on_mesh(y, letters + ("." if self.out_proj else "N")), bias

    def _attend(
        self, text: Array, x: Array, rotary_emb: Any, mask: Any = None, bias: Any = None
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B T N H"]]:
        checks.states("hidden_states", x, self.query_dim, "query_dim")
        b, t, _ = x.shape
        checks.states("encoder_hidden_states", text, self.added_kv_proj_dim, "added_kv_proj_dim", b)
        s = text.shape[1]
        rotary = self._check_rotary(rotary_emb, b, s + t, "rotary_emb")
        both = jax.ShapeDtypeStruct((b, s + t), x.dtype)
        prepared = self._prepare(b, s + t, both, mask, bias)
        to_q, q, k, v = self._joint_heads(text, x, rotary)
        out = self._run_attention(self._noted(prepared, to_q), q, k, v, bias)
        return out[:, :s], out[:, s:]

    def _joint_heads(
        self, text: Array, x: Array, rotary: Rotary | None
    ) -> tuple[Projection, Array, Array, Array]:
        """Return the picture's query projection, then q, k and v of the joint sequence."""
        s, kv = text.shape[1], self.kv_heads
        of_text, of_picture = (None, None) if rotary is None else rotary.split(s)
        # A text is short: its length is not sharded.
        made, added_q, added_k = self._projection, self.norm_added_q, self.norm_added_k
        to_q = (
            made("query_proj", text, self.add_q_proj, added_q, of_text, "B.NH"),
            made("query_proj", x, self.to_q, self.norm_q, of_picture),
        )
        to_k = (
            made("key_proj", text, self.add_k_proj, added_k, of_text, "B.KH"),
            made("key_proj", x, self.to_k, self.norm_k, of_picture, "BSKH"),
        )
        to_v = tuple(Projection(to, "value_proj", kv) for to in (self.add_v_proj, self.to_v))

        def joint(to: tuple[Projection, ...]) -> Array:
            both = zip((text, x), to, strict=True)
            return jnp.concatenate([self._project(*one) for one in both], axis=1)

        q, k = self._on_mesh(joint(to_q), "BTNH"), self._on_mesh(joint(to_k), "BSKH")
        return to_q[1], q, k, self._on_mesh(joint(to_v), "BSKH")
