"""Wan 2.1's transformer: a noisy latent video, its time, a text (and an image) in, the velocity
out.

    e = time;  c = text;  x = patches of the latents
    in each block:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + modulation(e)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
        x += cross_attention(norm(x), c [and the image])
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (shift, scale) = table + e

The blocks are stacked along an axis and scanned: they compile once, however many there are. Axes: B
batch, T tokens, S tokens of text or image, D width, L layers; F, H, W, C frames, rows, columns,
channels of the latents.

Source: Wan 2.1, https://arxiv.org/abs/2503.20314; parameter names are those of diffusers.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.errors import InputError
from maxattn.modules import KV

from .conditions import Conditions
from .layers import FeedForward, gated, modulated, norm32
from .sizes import Sizes

Latents = Float[Array, "B F H W C"]
Tokens = Float[Array, "B T D"]


class Block(nnx.Module):
    """Self-attention, cross-attention to text and image, and a feed-forward layer, modulated by the
    time.
    """

    def __init__(
        self,
        sizes: Sizes,
        config: ma.AttentionConfig | None,
        mesh: Any,
        *,
        rngs: nnx.Rngs,
        **how: Any,
    ) -> None:
        dim = sizes.dim
        attention: dict[str, Any] = {
            "heads": sizes.num_attention_heads,
            "dim_head": sizes.attention_head_dim,
            "bias": True,
            "eps": sizes.eps,
            "qk_norm": "rms_norm_across_heads",
            "config": config,
            "mesh": mesh,
            "rngs": rngs,
            **how,
        }
        self.mesh = mesh
        self.norm1 = norm32(dim, sizes.eps, False, rngs)
        self.attn1 = ma.FlaxAttention(dim, **attention)
        self.norm2 = norm32(dim, sizes.eps, True, rngs)
        self.attn2 = ma.CrossAttention(dim, added_kv_proj_dim=sizes.added_kv_proj_dim, **attention)
        self.norm3 = norm32(dim, sizes.eps, False, rngs)
        self.ffn = FeedForward(dim, sizes.ffn_dim, rngs=rngs, **how)
        self.scale_shift_table = table(6, dim, rngs)

    def __call__(
        self, x: Tokens, modulation: Float[Array, "B 6 D"], rotary: ma.Rotary, kv: KV
    ) -> Tokens:
        """Run the three layers.

        Args:
            x: the video's tokens.
            modulation: what the time says to all blocks; this block's table is added.
            rotary: positions of the tokens.
            kv: keys and values of text and image, from `attn2.compute_kv`.
        """
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(
            self.scale_shift_table[...] + modulation, 6, axis=1
        )
        x = gated(x, self.attn1(modulated(x, self.norm1, scale1, shift1), rotary_emb=rotary), gate1)
        x = x + self.attn2(self.norm2(x).astype(x.dtype), kv=kv)
        x = gated(x, self.ffn(modulated(x, self.norm3, scale2, shift2)), gate2)
        return sharding.constrain(x, self.mesh, "BT.")


class WanTransformer3D(nnx.Module):
    """Predict the velocity of noisy latents.

    Args:
        sizes: `SIZES[...]`, or `Sizes.of_folder(...)`.
        config: attention's settings; its `remat_policy` governs what a training step keeps of each
            block.
        mesh: devices to compute on; default the one there is.
        dtype: of the computation; norms, modulation and softmax are float32 whatever it is. Default
            float32.
        param_dtype: of the parameters; norms and modulation tables stay float32. Default float32.
        rngs: source of the initial parameters.
    """

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("blocks",)
    diffusers_ignored: ClassVar[tuple[str, ...]] = (
        "norm_added_q",
    )  # in real files, and read by nobody

    def __init__(
        self,
        sizes: Sizes,
        config: ma.AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.sizes, self.config, self.mesh, self.dtype = sizes, config, mesh, dtype
        self.patch_embedding = nnx.Conv(
            sizes.in_channels,
            sizes.dim,
            sizes.patch_size,
            sizes.patch_size,
            padding="VALID",
            rngs=rngs,
            **how,
        )
        self.condition_embedder = Conditions(sizes, rngs=rngs, **how)
        keys = jax.random.split(rngs.params(), sizes.num_layers)
        # The layer axis comes before the axes that a parameter's own metadata name.
        stacked = nnx.vmap(
            lambda key: Block(sizes, config, mesh, rngs=nnx.Rngs(key), **how),
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        self.blocks: Block = stacked(keys)
        self.norm_out = norm32(sizes.dim, sizes.eps, False, rngs)
        numbers = (
            sizes.out_channels * sizes.patch_size[0] * sizes.patch_size[1] * sizes.patch_size[2]
        )
        self.proj_out = nnx.Linear(sizes.dim, numbers, rngs=rngs, **how)
        self.scale_shift_table = table(2, sizes.dim, rngs)

    def encode(
        self, text: Float[Array, "B S C"], image: Float[Array, "B S2 C2"] | None = None
    ) -> KV:
        """Compute the keys and values of a text (and image) for every block: once, not once a
        denoising step.

        Args:
            text: states of the text encoder, [B, S, text_dim].
            image: states of the image encoder, [B, S', image_dim], for an image-to-video model.

        Returns:
            A `KV` whose arrays have a leading axis of layers.
        """
        self._check_image(image)
        c = self.condition_embedder.text(text.astype(self.dtype))
        i = None if image is None else self.condition_embedder.image(image.astype(self.dtype))
        return nnx.scan(lambda block: block.attn2.compute_kv(c, i), in_axes=0, out_axes=0)(
            self.blocks
        )

    def __call__(
        self,
        latents: Latents,
        t: Float[Array, " B"],
        text: Float[Array, "B S C"] | None = None,
        image: Float[Array, "B S2 C2"] | None = None,
        kv: KV | None = None,
    ) -> Latents:
        """Predict the velocity.

        Args:
            latents: noisy; for image-to-video with the condition's channels behind the noise's.
            t: times, 0 (clean) to 1000 (noise).
            text, image: as for `encode`; or else
            kv: what `encode` gave.
        """
        if (text is None) == (kv is None):
            said = "None, and no kv" if text is None else "given, and kv too"
            raise InputError(
                "text",
                said,
                "the model takes exactly one of text and kv",
                "pass text, or kv=encode(text)",
            )
        grid = self._grid(latents)
        kv = self.encode(text, image) if text is not None else kv
        rotary = ma.rope_3d(self.sizes.attention_head_dim, *grid, theta=self.sizes.rope_theta)
        time = self.condition_embedder.time(t)
        x = rearrange(self.patch_embedding(latents.astype(self.dtype)), "B F H W D -> B (F H W) D")
        x = sharding.constrain(x, self.mesh, "BT.")
        run = ma.remat(Block.__call__, self.config)
        step = nnx.scan(
            lambda x, block, kv: run(block, x, time.modulation, rotary, kv),
            in_axes=(nnx.Carry, 0, 0),
            out_axes=nnx.Carry,
        )
        return self._head(step(x, self.blocks, kv), time.embedding, grid)

    def _head(self, x: Tokens, e: Float[Array, "B D"], grid: tuple[int, int, int]) -> Latents:
        shift, scale = jnp.split(
            self.scale_shift_table[...] + e.astype(jnp.float32)[:, None], 2, axis=1
        )
        x = self.proj_out(modulated(x, self.norm_out, scale, shift))
        places = dict(zip("FHWfhw", (*grid, *self.sizes.patch_size), strict=True))
        return rearrange(x, "B (F H W) (f h w C) -> B (F f) (H h) (W w) C", **places)

    def _grid(self, latents: Latents) -> tuple[int, int, int]:
        """Count the tokens along frames, rows and columns."""
        _, *sides, channels = latents.shape
        if channels != self.sizes.in_channels:
            rule = (
                f"the model takes {self.sizes.in_channels} channels, in the last axis of [B, F, H,"
                " W, C]"
            )
            raise InputError(
                "latents", f"shape {tuple(latents.shape)}", rule, "move the channels to the end"
            )
        if any(side % patch for side, patch in zip(sides, self.sizes.patch_size, strict=True)):
            rule = f"frames, rows and columns divide by the patch {self.sizes.patch_size}"
            raise InputError(
                "latents", f"shape {tuple(latents.shape)}", rule, "crop or pad the video"
            )
        frames, rows, columns = (
            side // patch for side, patch in zip(sides, self.sizes.patch_size, strict=True)
        )
        return frames, rows, columns

    def _check_image(self, image: Any) -> None:
        if (image is None) != (self.sizes.image_dim is None):
            said = "None" if image is None else f"shape {tuple(image.shape)}"
            kind = "text-to-video" if self.sizes.image_dim is None else "image-to-video"
            rule = f"this is a model for {kind} (image_dim={self.sizes.image_dim})"
            raise InputError(
                "image",
                said,
                rule,
                "pass no image" if image is not None else "pass the image's states",
            )


def table(rows: int, dim: int, rngs: nnx.Rngs) -> nnx.Param[Float[Array, "1 {rows} {dim}"]]:
    """Make the learned part of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))
