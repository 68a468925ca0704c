"""Cross-attention: `CrossAttention`, and `KV`, the keys and values of a text (and image) made once
for many steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import sharding
from maxattn.config import AttentionConfig
from maxattn.errors import InputError
from maxattn.modules import checks
from maxattn.modules.base import BIAS_INIT, KERNEL_INIT, AttentionBase, linear_on_mesh
from maxattn.modules.qk_norm import QKNorm
from maxattn.rope import Rotary


class KV(NamedTuple):
    """Hold keys, already normed and rotated, and values.

    Args:
        k, v: [B, S, K, H], of the text.
        image_k, image_v: [B, S', K, H], of the image, or None.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    image_k: Float[Array, "B S2 K H"] | None = None
    image_v: Float[Array, "B S2 K H"] | None = None


class CrossAttention(AttentionBase):
    """Attend from every token to the tokens of another sequence, such as a text.

    y = to_out(attend(q, k, v) [+ attend(q, k_image, v_image)]),  q = norm_q(to_q x),  k =
    norm_k(to_k text), k_image = norm_added_k(add_k_proj image)

    Args:
        query_dim: channels of the input.
        cross_attention_dim: channels of the other sequence; default query_dim.
        heads, kv_heads, dim_head, dropout, bias, out_bias, qk_norm, eps, scale, out_dim: as in
            `FlaxAttention`.
        added_kv_proj_dim: channels of an image's tokens, attended to beside the text, each with its
            own softmax, and the two results summed; default no image.
        config, mesh, dtype, param_dtype, precision, kernel_init, bias_init, rngs: as in
            `FlaxAttention`. The config's `cross_attention` governs the kernel.

    Raises:
        InputError: for sizes that do not divide, or a value out of range.

    Source: image keys and values beside the text's: Wan 2.1, https://arxiv.org/abs/2503.20314
    """

    role: ClassVar[Literal["self", "cross"]] = "cross"

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
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        how |= {"kernel_init": kernel_init, "bias_init": bias_init, "rngs": rngs}
        super().__init__(
            query_dim,
            self.cross_attention_dim,
            heads,
            kv_heads,
            dim_head,
            dropout,
            bias,
            out_bias,
            qk_norm,
            eps,
            scale,
            out_dim,
            config=config,
            mesh=mesh,
            **how,
        )
        self.norm_added_k: QKNorm | None = nnx.data(None)
        if added_kv_proj_dim is not None:
            self._add_image(added_kv_proj_dim, bias, how)

    def _add_image(self, width: int, bias: bool, how: dict[str, Any]) -> None:
        checks.positive("added_kv_proj_dim", width)
        inner = self.kv_heads * self.dim_head
        self.add_k_proj: nnx.Linear = linear_on_mesh(width, inner, bias, ("fsdp", "tensor"), **how)
        self.add_v_proj: nnx.Linear = linear_on_mesh(width, inner, bias, ("fsdp", "tensor"), **how)
        self.norm_added_k = self._norm(self.kv_heads, how["param_dtype"], how["rngs"])

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
        """Attend to another sequence, given as its states or as the `KV` made of them.

        Args:
            hidden_states: [B, T, query_dim].
            encoder_hidden_states: [B, S, cross_attention_dim]; or else
            kv: what `compute_kv` returned.
            encoder_hidden_states_image: [B, S', added_kv_proj_dim], beside encoder_hidden_states,
                for a module that was built with added_kv_proj_dim.
            mask: over the text's keys, a mask of `maxattn.masks`; default everything. All image
                tokens are attended to.
            bias: added to the text's scores, each axis of [B, N, T, S] full or 1.
            rotary_emb: positions of the queries; default none.
            rotary_emb_k: positions of the text's keys; default none. Not with kv, whose keys are
                already rotated.
            deterministic: False drops output channels at random; default what the module's train()
                or eval() set last, and True before.
            rngs: source of the dropout, needed only then.

        Raises:
            InputError: for shapes or dtypes that do not fit, for both or neither of
                encoder_hidden_states and kv, or dropout without rngs.
        """
        checks.states("hidden_states", hidden_states, self.query_dim, "query_dim")
        checks.dropout_rngs(self.dropout, deterministic, rngs)
        b, t, _ = hidden_states.shape
        self._check_source(b, encoder_hidden_states, kv, encoder_hidden_states_image, rotary_emb_k)
        rotary_q = self._check_rotary(rotary_emb, b, t, "rotary_emb")
        text: Any = encoder_hidden_states
        self._check_attention(b, t, (text if kv is None else kv.k).shape[1], mask, bias)
        kv = self.compute_kv(text, encoder_hidden_states_image, rotary_emb_k) if kv is None else kv
        q = self._queries(hidden_states, rotary_q)
        out = self._attend(q, kv.k, kv.v, mask, bias)
        if kv.image_k is not None and kv.image_v is not None:
            out = out + self._attend(q, kv.image_k, kv.image_v)
        return self._output(out, deterministic, rngs)

    def compute_kv(
        self,
        text: Float[Array, "B S cross_attention_dim"],
        image: Float[Array, "B S2 added_kv_proj_dim"] | None = None,
        rotary_emb_k: Any = None,
    ) -> KV:
        """Make the keys and values of a text once, for all denoising steps.

        Args:
            text: [B, S, cross_attention_dim].
            image: [B, S', added_kv_proj_dim], for a module that was built with added_kv_proj_dim.
            rotary_emb_k: positions of the text's keys; default none.

        Raises:
            InputError: for shapes or dtypes that do not fit.
        """
        checks.states(
            "encoder_hidden_states", text, self.cross_attention_dim, "cross_attention_dim"
        )
        b, s, _ = text.shape
        self._check_image(image, b)
        rotary_k = self._check_rotary(rotary_emb_k, b, s, "rotary_emb_k")
        k, v = self._keys_values(text, self.to_k, self.to_v, self.norm_k, rotary_k)
        if image is None:
            return KV(k, v)
        return KV(
            k, v, *self._keys_values(image, self.add_k_proj, self.add_v_proj, self.norm_added_k)
        )

    def _keys_values(
        self,
        x: Array,
        to_k: nnx.Linear,
        to_v: nnx.Linear,
        norm: QKNorm | None,
        rotary: Rotary | None = None,
    ) -> tuple[Array, Array]:
        k = self._turned_heads(x, to_k, "key_proj", self.kv_heads, norm, rotary, "B.KH")
        v = self._to_heads(self._project(x, to_v, "value_proj"), self.kv_heads)
        # A text is short and every shard of the queries needs all of it: its length stays whole.
        return sharding.constrain(k, self.mesh, "B.KH"), sharding.constrain(v, self.mesh, "B.KH")

    # ---- what is refused -------------------------------------------------------------------------

    def _check_source(
        self, batch: int, text: Any, kv: KV | None, image: Any, rotary_emb_k: Any
    ) -> None:
        if (text is None) == (kv is None):
            raise InputError(
                "encoder_hidden_states",
                "None, and no kv" if text is None else "given, and kv too",
                "cross-attention takes exactly one of encoder_hidden_states and kv",
                "pass the text's states, or kv=module.compute_kv(text)",
            )
        if kv is None:
            checks.states(
                "encoder_hidden_states",
                text,
                self.cross_attention_dim,
                "cross_attention_dim",
                batch,
            )
            return
        for name, value in (("encoder_hidden_states_image", image), ("rotary_emb_k", rotary_emb_k)):
            if value is not None:
                raise InputError(
                    name,
                    "given, and kv too",
                    "kv already holds its part",
                    f"give {name} to compute_kv",
                )
        self._check_kv(kv, batch)

    def _check_image(self, image: Any, batch: int) -> None:
        if (image is None) != (self.added_kv_proj_dim is None):
            raise InputError(
                "encoder_hidden_states_image",
                "None" if image is None else f"shape {tuple(image.shape)}",
                f"the module was built with added_kv_proj_dim={self.added_kv_proj_dim}, so it "
                + (
                    "attends to an image too"
                    if image is None
                    else "has no projections for an image"
                ),
                (
                    "pass the image's states"
                    if image is None
                    else "build it with added_kv_proj_dim, or pass no image"
                ),
            )
        if image is not None and self.added_kv_proj_dim is not None:
            checks.states(
                "encoder_hidden_states_image",
                image,
                self.added_kv_proj_dim,
                "added_kv_proj_dim",
                batch,
            )

    def _check_kv(self, kv: Any, batch: int) -> None:
        if not isinstance(kv, KV):
            raise InputError(
                "kv", type(kv).__name__, "it must be a KV", "make it with module.compute_kv(text)"
            )
        if (kv.image_k is None) != (self.added_kv_proj_dim is None):
            raise InputError(
                "kv",
                "without an image" if kv.image_k is None else "with an image",
                f"the module was built with added_kv_proj_dim={self.added_kv_proj_dim}",
                "make it with this module's compute_kv",
            )
        for name, x in kv._asdict().items():
            if x is not None and (
                x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, self.kv_heads, self.dim_head)
            ):
                raise InputError(
                    f"kv.{name}",
                    f"shape {tuple(x.shape)}",
                    f"it must be [{batch}, S, {self.kv_heads}, {self.dim_head}]",
                    "make it with this module's compute_kv, from as many examples as"
                    " hidden_states has",
                )
