"""A whole Wan-style video diffusion transformer: a noisy video in, its velocity out.

    e = embedding of t;  c = embedding of the prompt;  x = patches of the video
    in each block:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + projection(e)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
        x += cross_attention(norm(x), c)
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (shift, scale) = table + e

Axes: B batch, T tokens of the video, S words of the prompt, D width; F, H, W, C frames, rows,
columns, channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common.layers import on_mesh, sinusoids
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

import maxattn as ma
from maxattn.masks import Mask
from maxattn.modules import KV

from .settings import ModelSettings, Settings
from .text import TextEncoder, padding_mask

Video = Float[Array, "B F H W C"]
Tokens = Float[Array, "B T D"]
Words = Int[Array, "B S"]


class WanTransformer(nnx.Module):
    """Predict the velocity of a noisy video, given its time and a prompt.

    Args:
        settings: sizes (`settings.model`, `settings.data`) and the keys of attention.
        mesh: devices to compute on; default the one there is.
        rngs: source of the initial parameters.

    Source: Wan 2.1, https://arxiv.org/abs/2503.20314
    """

    def __init__(
        self, settings: Settings, mesh: jax.sharding.Mesh | None = None, *, rngs: nnx.Rngs
    ) -> None:
        sizes = settings.model
        self.settings, self.mesh = settings, mesh
        numbers = sizes.patch[0] * sizes.patch[1] * sizes.patch[2] * settings.video_shape[3]
        self.patch_embedding = nnx.Linear(numbers, sizes.dim, rngs=rngs)
        # RoPE tells only how far tokens are from each other. In pure noise all tokens look alike,
        # and nothing else says which frame is the first: without this table, left and right are
        # told apart late or never.
        table = jax.random.normal(rngs.params(), (*settings.grid, sizes.dim))
        self.position = nnx.Param(0.5 * table)
        self.time_embedding = TimeEmbedding(sizes, rngs=rngs)
        self.text_encoder = TextEncoder(sizes.dim, rngs=rngs)
        self.blocks = nnx.List([Block(settings, mesh, rngs=rngs) for _ in range(sizes.layers)])
        self.head = Head(sizes.dim, numbers, rngs=rngs)

    def encode(self, words: Words) -> tuple[KV, ...]:
        """Compute the keys and values of the prompts for every block, once for all steps."""
        c = self.text_encoder(words)
        return tuple(block.attn2.compute_kv(c) for block in self.blocks)

    def __call__(
        self, video: Video, t: Float[Array, " B"], words: Words, kv: Sequence[KV] | None = None
    ) -> Video:
        """Predict the velocity.

        Args:
            video: noisy videos.
            t: their times, 0 (clean) to 1 (noise).
            words: token ids of their prompts.
            kv: what `encode(words)` gave; default computed here.
        """
        settings, mask = self.settings, padding_mask(words)
        freqs = ma.rope_3d(settings.model.dim_head, *settings.grid, theta=settings.model.rope_theta)
        e, modulation = self.time_embedding(t)
        x = self.patch_embedding(patchify(video, settings.model.patch))
        x = x + rearrange(self.position[...], "F H W D -> (F H W) D")
        run = ma.remat(Block.__call__, settings)
        every = self.encode(words) if kv is None else kv
        for block, its_kv in zip(self.blocks, every, strict=True):
            x = run(block, x, modulation, freqs, its_kv, mask)
        return unpatchify(self.head(x, e), settings.grid, settings.model.patch)


class Block(nnx.Module):
    """Self-attention, cross-attention to the prompt, feed-forward, all modulated by the time."""

    def __init__(
        self, settings: Settings, mesh: jax.sharding.Mesh | None, *, rngs: nnx.Rngs
    ) -> None:
        sizes = settings.model
        heads = {"heads": sizes.heads, "dim_head": sizes.dim_head, "bias": True}
        norm = {"qk_norm": "rms_norm_across_heads", "eps": 1e-6}
        how: dict[str, Any] = heads | norm | {"config": settings, "mesh": mesh, "rngs": rngs}
        self.scale_shift_table = scale_shift_table(6, sizes.dim, rngs)
        self.norm1 = plain_norm(sizes.dim, rngs)
        self.attn1 = ma.FlaxAttention(sizes.dim, **how)
        self.norm2 = nnx.LayerNorm(sizes.dim, epsilon=1e-6, rngs=rngs)
        self.attn2 = ma.CrossAttention(sizes.dim, **how)
        self.norm3 = plain_norm(sizes.dim, rngs)
        self.ffn = FeedForward(sizes.dim, sizes.ffn_dim, rngs=rngs)

    def __call__(
        self, x: Tokens, modulation: Float[Array, "B 6 D"], freqs: ma.Rotary, kv: KV, mask: Mask
    ) -> Tokens:
        """Run the three layers.

        Args:
            x: the video's tokens.
            modulation: what the time says to all blocks; this block's table is added.
            freqs: RoPE of the tokens.
            kv: keys and values of the prompt.
            mask: of the prompt's padding.
        """
        table = self.scale_shift_table[...] + modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(table, 6, axis=1)
        x = x + gate1 * self.attn1(self.norm1(x) * (1 + scale1) + shift1, rotary_emb=freqs)
        x = x + self.attn2(self.norm2(x), kv=kv, mask=mask)
        return x + gate2 * self.ffn(self.norm3(x) * (1 + scale2) + shift2)


class FeedForward(nnx.Module):
    """Two layers with a tanh gelu between; their kernels name mesh axes as attention's do."""

    def __init__(self, dim: int, inner: int, *, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(dim, inner, kernel_metadata=on_mesh("fsdp", "tensor"), rngs=rngs)
        self.down = nnx.Linear(inner, dim, kernel_metadata=on_mesh("tensor", "fsdp"), rngs=rngs)

    def __call__(self, x: Tokens) -> Tokens:
        """Run both layers on every token."""
        return self.down(nnx.gelu(self.up(x), approximate=True))


class Head(nnx.Module):
    """Modulate the tokens a last time and turn each into the numbers of its patch."""

    def __init__(self, dim: int, numbers: int, *, rngs: nnx.Rngs) -> None:
        self.scale_shift_table = scale_shift_table(2, dim, rngs)
        self.norm_out = plain_norm(dim, rngs)
        # Zero at first, so that training starts from the prediction "nothing moves".
        self.proj_out = nnx.Linear(dim, numbers, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: Tokens, e: Float[Array, "B D"]) -> Float[Array, "B T P"]:
        """Turn tokens into patches."""
        shift, scale = jnp.split(self.scale_shift_table[...] + e[:, None], 2, axis=1)
        return self.proj_out(self.norm_out(x) * (1 + scale) + shift)


class TimeEmbedding(nnx.Module):
    """Embed the time for the head, and project it to the six modulations that all blocks share."""

    def __init__(self, sizes: ModelSettings, *, rngs: nnx.Rngs) -> None:
        self.width = sizes.time_dim
        self.linear_1 = nnx.Linear(sizes.time_dim, sizes.dim, rngs=rngs)
        self.linear_2 = nnx.Linear(sizes.dim, sizes.dim, rngs=rngs)
        self.projection = nnx.Linear(sizes.dim, 6 * sizes.dim, rngs=rngs)

    def __call__(self, t: Float[Array, " B"]) -> tuple[Float[Array, "B D"], Float[Array, "B 6 D"]]:
        """Return the embedding and the modulations."""
        e = self.linear_2(nnx.silu(self.linear_1(sinusoids(1000.0 * t, self.width))))
        return e, rearrange(self.projection(nnx.silu(e)), "B (six D) -> B six D", six=6)


def patchify(video: Video, patch: tuple[int, int, int]) -> Float[Array, "B T P"]:
    """Cut videos into boxes of `patch` frames, rows and columns: a token each, raster order."""
    f, h, w = patch
    return rearrange(video, "B (F f) (H h) (W w) C -> B (F H W) (f h w C)", f=f, h=h, w=w)


def unpatchify(
    x: Float[Array, "B T P"], grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> Video:
    """Undo `patchify`; `grid` counts the boxes along frames, rows and columns."""
    (frames, height, width), (f, h, w) = grid, patch
    sizes = {"F": frames, "H": height, "W": width, "f": f, "h": h, "w": w}
    return rearrange(x, "B (F H W) (f h w C) -> B (F f) (H h) (W w) C", **sizes)


def plain_norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Make a layer norm without parameters: the modulation after it has them."""
    return nnx.LayerNorm(dim, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)


def scale_shift_table(
    rows: int, dim: int, rngs: nnx.Rngs
) -> nnx.Param[Float[Array, "1 {rows} {dim}"]]:
    """Make the learned part of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))
