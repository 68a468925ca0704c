"""Cross-attention: `CrossAttention`, and `KV`, keys and values computed once for many steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.config import AttentionConfig
from maxattn.config.arguments import answers_names
from maxattn.errors import InputError
from maxattn.masks.operands import check_values
from maxattn.modules import checks
from maxattn.modules.base import (
    BIAS_INIT,
    KERNEL_INIT,
    AttentionBase,
    Build,
    ModuleSizes,
    Projection,
)
from maxattn.modules.explicit import like_states, like_text, over_explicit_axes
from maxattn.modules.qk_norm import QKNorm
from maxattn.rope import Rotary


class KV(NamedTuple):
    """Keys and values of a text, and optionally of an image, as `compute_kv` returns them.

    Args:
        k, v: the text's keys [B, S, K, H], normalised and rotated, and values [B, S, K, V].
        image_k, image_v: the image's, with S' tokens; default None. V is `dim_head_v`.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K V"]
    image_k: Float[Array, "B S2 K H"] | None = None
    image_v: Float[Array, "B S2 K V"] | None = None


class CrossAttention(AttentionBase):
    """Attend from every token to the tokens of another sequence, such as a text.

    y = to_out(attend(q, k, v) [+ attend(q, k_image, v_image)]), where
    q = norm_q(to_q x), k = norm_k(to_k text), v = to_v text,
    k_image = norm_added_k(add_k_proj image), v_image = add_v_proj image

    Args:
        query_dim: channels of the input.
        cross_attention_dim: channels of the other sequence; default query_dim.
        heads, kv_heads, dim_head, dropout, bias, out_bias, qk_norm: as in `FlaxAttention`.
        eps, scale, out_dim, out_proj, gate, dim_head_v: as in `FlaxAttention`.
        added_kv_proj_dim: channels of an image's tokens; default no image. Text and image have a
            softmax each, and their results are added.
        config: as in `FlaxAttention`; its setting `cross_attention` chooses the kernel.
        mesh, dtype, param_dtype, precision, kernel_init, bias_init, rngs: as in `FlaxAttention`.

    Raises:
        InputError: if kv_heads does not divide heads, or a value is out of range.

    Source of the image's own keys and values: Wan 2.1, https://arxiv.org/abs/2503.20314

    >>> layer = ma.CrossAttention(64, 32, heads=4, dim_head=16, rngs=nnx.Rngs(0))
    >>> x, text = jnp.ones((1, 10, 64)), jnp.ones((1, 7, 32))
    >>> kv = layer.compute_kv(text)  # once for all denoising steps
    >>> layer(x, kv=kv).shape, bool(jnp.allclose(layer(x, kv=kv), layer(x, text)))
    ((1, 10, 64), True)
    """

    role: ClassVar[Literal["self", "cross"]] = "cross"

    @answers_names
    def __init__(
        self,
        query_dim: int,
        cross_attention_dim: int | None = None,
        heads: int = 8,
        kv_heads: int | None = None,
        dim_head: int = 64,
        dropout: float = 0.0,
        bias: bool = False,
        out_bias: bool = True,
        qk_norm: str | None = None,
        added_kv_proj_dim: int | None = None,
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
        self.cross_attention_dim = query_dim if cross_attention_dim is None else cross_attention_dim
        self.added_kv_proj_dim = added_kv_proj_dim
        checks.positive("cross_attention_dim", self.cross_attention_dim)
        build = Build.of(locals())
        sizes = ModuleSizes.of(locals() | {"kv_dim": self.cross_attention_dim})
        super().__init__(sizes, build, config, mesh)
        self.norm_added_k: QKNorm | None = nnx.data(None)
        if (width := added_kv_proj_dim) is not None:
            checks.positive("added_kv_proj_dim", width)
            self.add_k_proj, self.add_v_proj = self._to_keys_and_values(width, bias, build)
            self.norm_added_k = self._norm(self.kv_heads, build)

    @answers_names
    @over_explicit_axes(like_states)
    def __call__(
        self,
        hidden_states: Float[Array, "B T query_dim"],
        encoder_hidden_states: Float[Array, "B S cross_attention_dim"] | None = None,
        kv: KV | None = None,
        encoder_hidden_states_image: Float[Array, "B S2 added_kv_proj_dim"] | None = None,
        mask: Any = None,
        bias: Float[Array, "#B #N #T #S"] | None = None,
        rotary_emb: Any = None,
        rotary_emb_k: Any = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T out_dim"]:
        """Attend to another sequence, passed as its states or as its `KV`.

        Args:
            hidden_states: [B, T, query_dim].
            encoder_hidden_states: [B, S, cross_attention_dim]. Pass either this or kv.
            kv: the result of `compute_kv`, which may serve many calls.
            encoder_hidden_states_image: [B, S', added_kv_proj_dim]. Required beside
                encoder_hidden_states if the module was built with added_kv_proj_dim.
            mask: over the text's keys, from `maxattn.masks`; default all pairs. Image tokens are
                never masked.
            bias: added to the text's scores; each axis of [B, N, T, S] is full or 1.
            rotary_emb: rotary embedding of the queries; default none.
            rotary_emb_k: rotary embedding of the text's keys; default none. Refused if kv is
                given, since its keys are rotated already.
            deterministic, rngs: as in a call of `FlaxAttention`.

        Returns:
            [B, T, out_dim].

        Raises:
            InputError: if shapes or dtypes do not fit, if both or neither of encoder_hidden_states
                and kv are given, or if there is dropout without rngs.
        """
        checks.states("hidden_states", hidden_states, self.query_dim, "query_dim")
        checks.dropout_rngs(self.dropout, deterministic, rngs)
        b, t, _ = hidden_states.shape
        text, image = encoder_hidden_states, encoder_hidden_states_image
        self._check_source(b, text, kv, image, rotary_emb_k)
        rotary_q = self._check_rotary(rotary_emb, b, t, "rotary_emb")
        keys: Any = (text, image) if kv is None else ((kv.k, kv.v), (kv.image_k, kv.image_v))
        prepared = self._prepare(b, t, keys[0], mask, bias)
        has_image = self.added_kv_proj_dim is not None
        of_image = self._prepare(b, t, keys[1]) if has_image else None
        to_q = self._projection("query_proj", hidden_states, self.to_q, self.norm_q, rotary_q)
        kv = self.compute_kv(keys[0], image, rotary_emb_k) if kv is None else kv
        q = self._on_mesh(self._project(hidden_states, to_q), to_q.letters)
        out = self._run_attention(self._noted(prepared, to_q), q, kv.k, kv.v, bias)
        if of_image is not None and kv.image_k is not None and kv.image_v is not None:
            out = out + self._run_attention(of_image, q, kv.image_k, kv.image_v)
        return self._output(out, hidden_states, deterministic, rngs)

    @answers_names
    @over_explicit_axes(like_text)
    def compute_kv(
        self,
        text: Float[Array, "B S cross_attention_dim"],
        image: Float[Array, "B S2 added_kv_proj_dim"] | None = None,
        rotary_emb_k: Any = None,
    ) -> KV:
        """Compute the keys and values of a text once, for all denoising steps.

        Args:
            text: [B, S, cross_attention_dim].
            image: [B, S', added_kv_proj_dim], if the module was built with added_kv_proj_dim.
            rotary_emb_k: rotary embedding of the text's keys; default none.

        Raises:
            InputError: if shapes or dtypes do not fit.
        """
        self._check_states(text, image)
        b, s, _ = text.shape
        rotary_k = self._check_rotary(rotary_emb_k, b, s, "rotary_emb_k", self.kv_heads)
        k, v = self._keys_values(text, self.to_k, self.to_v, self.norm_k, rotary_k)
        if image is None:
            return KV(k, v)
        added = self.add_k_proj, self.add_v_proj, self.norm_added_k
        return KV(k, v, *self._keys_values(image, *added))

    def _keys_values(
        self,
        x: Array,
        to_k: nnx.Linear,
        to_v: nnx.Linear,
        norm: QKNorm | None,
        rotary: Rotary | None = None,
    ) -> tuple[Array, Array]:
        # Every shard of the queries needs the whole text, which is short: its length is not split.
        k = self._project(x, self._projection("key_proj", x, to_k, norm, rotary, "B.KH"))
        v = self._project(x, Projection(to_v, "value_proj", self.kv_heads))
        return self._on_mesh(k, "B.KH"), self._on_mesh(v, "B.KH")

    # ---- checks of a call ------------------------------------------------------------------------

    def _check_source(
        self, batch: int, text: Any, kv: KV | None, image: Any, rotary_emb_k: Any
    ) -> None:
        if (text is None) == (kv is None):
            found = "None, and no kv" if text is None else "given, and kv too"
            rule = "cross-attention takes exactly one of encoder_hidden_states and kv"
            remedy = "pass the text's states, or kv=module.compute_kv(text)"
            raise InputError("encoder_hidden_states", found, rule, remedy)
        if kv is None:
            return self._check_states(text, image, batch)
        for name, value in (("encoder_hidden_states_image", image), ("rotary_emb_k", rotary_emb_k)):
            if value is not None:
                rule, remedy = "kv contains computed keys", f"pass {name} to compute_kv instead"
                raise InputError(name, "given, and kv too", rule, remedy)
        self._check_kv(kv, batch)

    def _check_states(self, text: Any, image: Any, batch: int | None = None) -> None:
        name, width = "encoder_hidden_states", self.cross_attention_dim
        checks.states(name, text, width, "cross_attention_dim", batch)
        name, width = "encoder_hidden_states_image", self.added_kv_proj_dim
        built = f"the module was built with added_kv_proj_dim={width}, so it"
        if image is None and width is not None:
            rule = f"{built} attends to an image too"
            raise InputError(name, "None", rule, "pass the image's states")
        if image is not None and width is None:
            rule = f"{built} has no projections for an image"
            remedy = "build it with added_kv_proj_dim, or pass no image"
            raise InputError(name, checks.described(image), rule, remedy)
        if image is not None and width is not None:
            checks.states(name, image, width, "added_kv_proj_dim", len(text))

    def _check_kv(self, kv: Any, batch: int) -> None:
        if not isinstance(kv, KV):
            remedy = "make it with module.compute_kv(text)"
            raise InputError("kv", type(kv).__name__, "it must be a KV", remedy)
        check_values("kv", kv)
        width, has_image = self.added_kv_proj_dim, kv[2:] != (None, None)
        if has_image != (width is not None):
            found = "with an image" if has_image else "without an image"
            rule = f"the module was built with added_kv_proj_dim={width}"
            raise InputError("kv", found, rule, _MAKE_KV)
        for name in KV._fields if has_image else KV._fields[:2]:
            x, dim = getattr(kv, name), self.dim_head_v if name.endswith("v") else self.dim_head
            shape = getattr(x, "shape", ())
            if len(shape) != 4 or (shape[0], *shape[2:]) != (batch, self.kv_heads, dim):
                rule = f"it must be an array [{batch}, S, {self.kv_heads}, {dim}]"
                remedy = f"{_MAKE_KV}, with the batch size of hidden_states"
                raise InputError(f"kv.{name}", checks.described(x), rule, remedy)


_MAKE_KV = "make it with this module's compute_kv"
