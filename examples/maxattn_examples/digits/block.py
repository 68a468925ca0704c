"""The layers of the digits' transformer, modulated by the time of the video or of each frame."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.masks import Mask
from maxattn.modules import KV
from maxattn.streaming import CacheLayer
from maxattn_examples.common.layers import on_mesh, sinusoids

from .settings import ModelSettings, Settings

Tokens = Float[Array, "B T D"]
Time = Float[Array, " B"] | Float[Array, "B F"]
Modulation = Float[Array, "B rows D"] | Float[Array, "B F rows D"]


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
        self,
        x: Tokens,
        modulation: Modulation,
        freqs: ma.Rotary,
        kv: KV,
        padding: Mask,
        mask: Mask | None = None,
        cache: CacheLayer | None = None,
    ) -> Any:
        """Run the three layers.

        Args:
            x: the video's tokens.
            modulation: what the time says to all blocks; this block's table is added.
            freqs: RoPE of the tokens.
            kv: keys and values of the prompt.
            padding: the mask of the prompt.
            mask: of self-attention; default everything.
            cache: a layer of a cache, which self-attention writes.

        Returns:
            The tokens; beside a cache a pair, with the whole cache.
        """
        table = self.scale_shift_table[...] + modulation
        shift1, scale1, gate1, shift2, scale2, gate2 = of_tokens(table, x.shape[1])
        y, kept = self._attend(self.norm1(x) * (1 + scale1) + shift1, freqs, mask, cache)
        x = x + gate1 * y
        x = x + self.attn2(self.norm2(x), kv=kv, mask=padding)
        x = x + gate2 * self.ffn(self.norm3(x) * (1 + scale2) + shift2)
        return x if cache is None else (x, kept)

    def _attend(
        self, x: Tokens, freqs: ma.Rotary, mask: Mask | None, cache: CacheLayer | None
    ) -> tuple[Tokens, ma.KVCache | None]:
        if cache is None:
            return self.attn1(x, freqs, mask), None
        return self.attn1(x, freqs, mask, cache=cache)


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

    def __call__(self, x: Tokens, e: Float[Array, "B *F D"]) -> Float[Array, "B T P"]:
        """Turn tokens into patches."""
        table = self.scale_shift_table[...] + e[..., None, :]
        shift, scale = of_tokens(table, x.shape[1])
        return self.proj_out(self.norm_out(x) * (1 + scale) + shift)


class TimeEmbedding(nnx.Module):
    """Embed the time for the head, and project it to the six modulations that all blocks share."""

    def __init__(self, sizes: ModelSettings, *, rngs: nnx.Rngs) -> None:
        self.width = sizes.time_dim
        self.linear_1 = nnx.Linear(sizes.time_dim, sizes.dim, rngs=rngs)
        self.linear_2 = nnx.Linear(sizes.dim, sizes.dim, rngs=rngs)
        self.projection = nnx.Linear(sizes.dim, 6 * sizes.dim, rngs=rngs)

    def __call__(self, t: Time) -> tuple[Array, Modulation]:
        """Return the embedding and the modulations, of videos or of their frames."""
        e = self.linear_2(nnx.silu(self.linear_1(sinusoids(1000.0 * t, self.width))))
        return e, rearrange(self.projection(nnx.silu(e)), "... (six D) -> ... six D", six=6)


def of_tokens(table: Modulation, tokens: int) -> list[Float[Array, "B _ D"]]:
    """Return the rows of a modulation: one for all tokens, or one for each, by its frame."""
    parts = jnp.split(table, table.shape[-2], axis=-2)
    if table.ndim == 3:
        return parts
    b, frames, _, d = table.shape
    # [B, F, 1, D] -> [B, F, T / F, D] -> [B, T, D]
    spread = (b, frames, tokens // frames, d)
    return [jnp.broadcast_to(part, spread).reshape(b, tokens, d) for part in parts]


def plain_norm(dim: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Make a layer norm without parameters: the modulation after it has them."""
    return nnx.LayerNorm(dim, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)


def scale_shift_table(
    rows: int, dim: int, rngs: nnx.Rngs
) -> nnx.Param[Float[Array, "1 {rows} {dim}"]]:
    """Make the learned part of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))
