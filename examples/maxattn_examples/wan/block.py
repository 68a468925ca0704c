"""A block of Wan's transformer, and how the time of a frame modulates its tokens."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn import sharding
from maxattn.masks import Mask
from maxattn.modules import KV, GatedBranch, adaptive_norm
from maxattn.streaming import CacheLayer
from maxattn_examples.common.layers import FeedForward, norm32
from maxattn_examples.common.residual import Residual, residual, rows_of

from .sizes import Sizes

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
            x: the video's tokens, with or without a branch that is to be added.
            modulation: what the times of all frames, or of the video, say to all blocks; this
                block's table is added.
            rotary: positions of the tokens.
            kv: keys and values of text and image, from `attn2.compute_kv`.
            mask: of self-attention; default everything.
            cache: a layer of a cache, which self-attention writes or reads.
            add: False: the last branch is left for the next norm to add. Default True.

        Returns:
            The tokens, or tokens and branch; beside a cache a pair, with the whole cache.
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
    """Make the learned part of a modulation."""
    return nnx.Param(dim**-0.5 * jax.random.normal(rngs.params(), (1, rows, dim)))
