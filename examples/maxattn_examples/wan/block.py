"""A block of Wan's transformer, and the embeddings of its conditions: time, text and image."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.masks import Mask
from maxattn.modules import KV, GatedBranch, adaptive_norm
from maxattn.streaming import CacheLayer
from maxattn_examples.common.layers import (
    Embedding,
    FeedForward,
    Residual,
    norm32,
    residual,
    rows_of,
    sinusoids,
)

from .settings import Sizes

Config = ma.AttentionConfig | None
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
        self,
        x: Tokens | Residual,
        modulation: Float[Array, "B F 6 D"],
        rotary: ma.Rotary,
        kv: KV,
        mask: Mask | None = None,
        cache: CacheLayer | None = None,
        add: bool = True,
    ) -> Any:
        """Run the three layers.

        Args:
            modulation: computed from the times of all frames, or of the video; this block's learned
                table
                is added.
            kv: keys and values of text and image, from `attn2.compute_kv`.
            mask: of self-attention; default none.
            cache: a layer of a cache, which self-attention writes or reads.
            add: False leaves the last branch for the next norm to add. Default True.

        Returns:
            The tokens, or tokens and branch; with a cache a pair, with the whole cache.
        """
        rows = rows_of(modulation, self.scale_shift_table[...])
        shift1, scale1, gate1, shift2, scale2, gate2 = rows
        x, y = residual(x).normed(self.norm1, scale1, shift1, self.mesh)
        y, kept = self._attend(y, rotary, mask, cache)
        x, y = adaptive_norm(x, self.norm2, branch=GatedBranch(y, gate1), mesh=self.mesh)
        x = x + self.attn2(y, kv=kv)
        x, y = adaptive_norm(x, self.norm3, scale2, shift2, mesh=self.mesh)
        out = Residual(x, GatedBranch(self.ffn(y), gate2))
        x = out if not add else sharding.constrain(out.total, self.mesh, "BT.")
        return x if cache is None else (x, kept)

    def _attend(
        self, x: Tokens, rotary: ma.Rotary, mask: Mask | None, cache: CacheLayer | None
    ) -> tuple[Tokens, ma.KVCache | None]:
        if cache is None:
            return self.attn1(x, rotary_emb=rotary, mask=mask), None
        return self.attn1(x, rotary_emb=rotary, mask=mask, cache=cache)


def table(rows: int, dim: int, rngs: nnx.Rngs) -> nnx.Param[Float[Array, "1 {rows} {dim}"]]:
    """Make the learned table of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))


class Time(NamedTuple):
    """The embedding of times, for the head and for all blocks.

    Args:
        embedding: [B, F, D] for each frame of tokens; F is 1 if a video has one time.
        modulation: [B, F, 6, D], float32.
    """

    embedding: Float[Array, "B F D"]
    modulation: Float[Array, "B F 6 D"]


class Conditions(nnx.Module):
    """Embed times, texts and images.

    Args:
        how: dtype and param_dtype; times are always embedded in float32.
    """

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any) -> None:
        dim, image = sizes.dim, sizes.image_dim
        self.freq_dim, self.dtype = sizes.freq_dim, how.get("dtype", jnp.float32)
        # bfloat16 has too few digits for the sinusoids of 1000 times, and TPUs multiply in it
        # unless they are told.
        exact: dict[str, Any] = {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        self.time_embedder = Embedding(sizes.freq_dim, dim, gelu=False, rngs=rngs, **exact)
        self.time_proj = nnx.Linear(dim, 6 * dim, rngs=rngs, **how)
        self.text_embedder = Embedding(sizes.text_dim, dim, gelu=True, rngs=rngs, **how)
        embedder = None if image is None else ImageEmbedding(sizes, rngs=rngs, **how)
        self.image_embedder = nnx.data(embedder)

    def time(self, t: Float[Array, "B F"]) -> Time:
        """Embed times, 0 to 1000."""
        e = self.time_embedder(sinusoids(t, self.freq_dim)).astype(self.dtype)
        modulation = rearrange(self.time_proj(nnx.silu(e)), "B F (six D) -> B F six D", six=6)
        return Time(e, modulation.astype(jnp.float32))

    def text(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed the states of a text encoder."""
        return self.text_embedder(states)

    def image(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed the states of an image encoder; of two images if positions are learned."""
        assert self.image_embedder is not None, "the model checks that it takes an image"
        return self.image_embedder(states)


class ImageEmbedding(nnx.Module):
    """Norm, two layers with an exact gelu, norm; with learned positions if the sizes have them."""

    def __init__(self, sizes: Sizes, *, rngs: nnx.Rngs, **how: Any) -> None:
        width: Any = sizes.image_dim
        self.norm1 = norm32(width, 1e-5, True, rngs)
        self.ff = FeedForward(width, width, sizes.dim, approximate=False, rngs=rngs, **how)
        self.norm2 = norm32(sizes.dim, 1e-5, True, rngs)
        tokens = sizes.pos_embed_seq_len
        positions = None if tokens is None else nnx.Param(jnp.zeros((1, tokens, width)))
        self.pos_embed = nnx.data(positions)

    def __call__(self, states: Float[Array, "B S C"]) -> Float[Array, "B S D"]:
        """Embed an image's states; with learned positions, B counts two images per example."""
        x = states
        if self.pos_embed is not None:
            # [2 B, S, C] -> [B, 2 S, C]
            x = x.reshape(-1, 2 * x.shape[1], x.shape[2]) + self.pos_embed[...].astype(x.dtype)
        x = self.norm1(x).astype(states.dtype)
        return self.norm2(self.ff(x)).astype(states.dtype)
