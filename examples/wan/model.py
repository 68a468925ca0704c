"""Wan's transformer: from a noisy latent video, its time, a text (and an image) to a velocity.

    e = time;  c = text;  x = patches of the latents
    in each block:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + modulation(e)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
        x += cross_attention(norm(x), c [and the image])
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (shift, scale) = table + e

A video has one time, or one for each frame of tokens: Wan 2.2's TI2V model continues an image that
is the first frame, at time 0. The blocks are stacked along an axis and scanned: they compile once,
however many there are.

Axes: B batch, T tokens, S tokens of text or image, D width, L layers; F, H, W, C frames, rows,
columns, channels of the latents.

Source: Wan 2.1 and 2.2, https://arxiv.org/abs/2503.20314; parameter names are those of diffusers.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from common.layers import FeedForward, gated, modulated, norm32
from common.scan import map_layers, run_layers, stacked
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.errors import InputError
from maxattn.modules import KV

from .conditions import Conditions
from .sizes import Sizes

Config = ma.AttentionConfig | None
Latents = Float[Array, "B F H W C"]
Tokens = Float[Array, "B T D"]


class Block(nnx.Module):
    """Self-attention, cross-attention to text and image, feed-forward, modulated by the time."""

    def __init__(
        self, sizes: Sizes, config: Config, mesh: Any, *, rngs: nnx.Rngs, **how: Any
    ) -> None:
        dim = sizes.dim
        heads = {"heads": sizes.num_attention_heads, "dim_head": sizes.attention_head_dim}
        norm = {"eps": sizes.eps, "qk_norm": "rms_norm_across_heads", "bias": True}
        where = {"config": config, "mesh": mesh, "rngs": rngs}
        attention: dict[str, Any] = {**heads, **norm, **where, **how}
        self.mesh = mesh
        self.norm1 = norm32(dim, sizes.eps, False, rngs)
        self.attn1 = ma.FlaxAttention(dim, **attention)
        self.norm2 = norm32(dim, sizes.eps, True, rngs)
        self.attn2 = ma.CrossAttention(dim, added_kv_proj_dim=sizes.added_kv_proj_dim, **attention)
        self.norm3 = norm32(dim, sizes.eps, False, rngs)
        self.ffn = FeedForward(dim, sizes.ffn_dim, rngs=rngs, **how)
        self.scale_shift_table = table(6, dim, rngs)

    def __call__(
        self, x: Tokens, modulation: Float[Array, "B F 6 D"], rotary: ma.Rotary, kv: KV
    ) -> Tokens:
        """Run the three layers.

        Args:
            x: the video's tokens.
            modulation: what the times of all frames, or of the video, say to all blocks; this
                block's table is added.
            rotary: positions of the tokens.
            kv: keys and values of text and image, from `attn2.compute_kv`.
        """
        parts = _of_tokens(self.scale_shift_table[...] + modulation, x.shape[1])
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
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
    # In real files, and read by nobody.
    diffusers_ignored: ClassVar[tuple[str, ...]] = ("norm_added_q",)

    def __init__(
        self,
        sizes: Sizes,
        config: Config = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.sizes, self.config, self.mesh, self.dtype = sizes, config, mesh, dtype
        patch = sizes.patch_size
        patches: dict[str, Any] = {"strides": patch, "padding": "VALID", "rngs": rngs, **how}
        self.patch_embedding = nnx.Conv(sizes.in_channels, sizes.dim, patch, **patches)
        self.condition_embedder = Conditions(sizes, rngs=rngs, **how)
        self.blocks = stacked(
            lambda rngs: Block(sizes, config, mesh, rngs=rngs, **how), sizes.num_layers, rngs
        )
        self.norm_out = norm32(sizes.dim, sizes.eps, False, rngs)
        numbers = sizes.out_channels * math.prod(patch)
        self.proj_out = nnx.Linear(sizes.dim, numbers, rngs=rngs, **how)
        self.scale_shift_table = table(2, sizes.dim, rngs)

    def encode(
        self, text: Float[Array, "B S C"], image: Float[Array, "B S2 C2"] | None = None
    ) -> KV:
        """Compute the keys and values of a text (and image) for every block, once for all steps.

        Args:
            text: states of the text encoder, [B, S, text_dim].
            image: states of the image encoder, [B, S', image_dim], for an image-to-video model.

        Returns:
            A `KV` whose arrays have a leading axis of layers.
        """
        self._check_image(image)
        c = self.condition_embedder.text(text.astype(self.dtype))
        i = None if image is None else self.condition_embedder.image(image.astype(self.dtype))
        return map_layers(lambda block: block.attn2.compute_kv(c, i), self.blocks)

    def __call__(
        self,
        latents: Latents,
        t: Float[Array, " B"] | Float[Array, "B F"],
        text: Float[Array, "B S C"] | None = None,
        image: Float[Array, "B S2 C2"] | None = None,
        kv: KV | None = None,
    ) -> Latents:
        """Predict the velocity.

        Args:
            latents: noisy; for image-to-video with the condition's channels behind the noise's.
            t: times, 0 (clean) to 1000 (noise), of each video or of each frame of its tokens.
            text, image: as for `encode`; or else
            kv: what `encode` gave.
        """
        _check_text(text, kv)
        grid = self._grid(latents)
        kv = self.encode(text, image) if text is not None else kv
        rotary = ma.rope_3d(self.sizes.attention_head_dim, *grid, theta=self.sizes.rope_theta)
        time = self.condition_embedder.time(_times(t, grid[0]))
        x = rearrange(self.patch_embedding(latents.astype(self.dtype)), "B F H W D -> B (F H W) D")
        x = sharding.constrain(x, self.mesh, "BT.")
        run = ma.remat(Block.__call__, self.config)

        def step(block: Block, x: Tokens, kv: KV) -> Tokens:
            return run(block, x, time.modulation, rotary, kv)

        return self._head(run_layers(step, self.blocks, x, kv), time.embedding, grid)

    def _head(self, x: Tokens, e: Float[Array, "B F D"], grid: tuple[int, int, int]) -> Latents:
        table = self.scale_shift_table[...] + e.astype(jnp.float32)[:, :, None]
        shift, scale = _of_tokens(table, x.shape[1])
        x = self.proj_out(modulated(x, self.norm_out, scale, shift))
        counts = dict(zip("FHWfhw", (*grid, *self.sizes.patch_size), strict=True))
        return rearrange(x, "B (F H W) (f h w C) -> B (F f) (H h) (W w) C", **counts)

    def _grid(self, latents: Latents) -> tuple[int, int, int]:
        """Count the tokens along frames, rows and columns."""
        (_, *sides, channels), sizes = latents.shape, self.sizes
        value = f"shape {tuple(latents.shape)}"
        if channels != sizes.in_channels:
            axes = "in the last axis of [B, F, H, W, C]"
            rule = f"the model takes {sizes.in_channels} channels, {axes}"
            raise InputError("latents", value, rule, "move the channels to the end")
        pairs = list(zip(sides, sizes.patch_size, strict=True))
        if any(side % patch for side, patch in pairs):
            rule = f"frames, rows and columns divide by the patch {sizes.patch_size}"
            raise InputError("latents", value, rule, "crop or pad the video")
        frames, rows, columns = (side // patch for side, patch in pairs)
        return frames, rows, columns

    def _check_image(self, image: Any) -> None:
        if (image is None) == (self.sizes.image_dim is None):
            return
        value = "None" if image is None else f"shape {tuple(image.shape)}"
        kind = "text-to-video" if self.sizes.image_dim is None else "image-to-video"
        rule = f"this is a model for {kind} (image_dim={self.sizes.image_dim})"
        remedy = "pass no image" if image is not None else "pass the image's states"
        raise InputError("image", value, rule, remedy)


def _of_tokens(table: Float[Array, "B F rows D"], tokens: int) -> tuple[Float[Array, "B _ D"], ...]:
    """Return the rows of a modulation for every token, or for all where F is 1."""
    b, frames, rows, d = table.shape
    if frames > 1:
        # [B, F, rows, D] -> [B, F, T / F, rows, D] -> [B, T, rows, D]
        spread = (b, frames, tokens // frames, rows, d)
        table = jnp.broadcast_to(table[:, :, None], spread).reshape(b, tokens, rows, d)
    return tuple(table[:, :, row] for row in range(rows))


def _times(t: Array, frames: int) -> Float[Array, "B F"]:
    """Return the times as [B, F], with F 1 where a video has one."""
    if t.ndim == 1:
        return t[:, None]
    if t.shape[1:] != (frames,):
        rule = f"it has a time for each video, [B], or for each of {frames} frames of tokens"
        raise InputError("t", f"shape {tuple(t.shape)}", rule, f"pass [B] or [B, {frames}]")
    return t


def _check_text(text: Any, kv: Any) -> None:
    if (text is None) == (kv is None):
        value = "None, and no kv" if text is None else "given, and kv too"
        rule = "the model takes exactly one of text and kv"
        raise InputError("text", value, rule, "pass text, or kv=encode(text)")


def table(rows: int, dim: int, rngs: nnx.Rngs) -> nnx.Param[Float[Array, "1 {rows} {dim}"]]:
    """Make the learned part of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))
