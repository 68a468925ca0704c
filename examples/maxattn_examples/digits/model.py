"""A whole Wan-style video diffusion transformer: a noisy video in, its velocity out.

    e = embedding of t;  c = embedding of the prompt;  x = patches of the video
    in each block:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + projection(e)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
        x += cross_attention(norm(x), c)
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (shift, scale) = table + e

A stream has a time for each frame, and its videos have any length: with `cache` the model makes one
block of a video, with `forcing` it sees a clip under the stream's mask.

Axes: B batch, T tokens of the video, S words of the prompt, D width; F, H, W, C frames, rows,
columns, channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

import maxattn as ma
from maxattn.modules import KV
from maxattn_examples.common.forcing import Forcing, View, check_call, view_of

from .block import Block, Head, Time, TimeEmbedding, Tokens
from .settings import Settings
from .text import TextEncoder, padding_mask

Video = Float[Array, "B F H W C"]
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
        table = jax.random.normal(rngs.params(), (*settings.numbered, sizes.dim))
        self.position = nnx.Param(0.5 * table)
        self.time_embedding = TimeEmbedding(sizes, rngs=rngs)
        self.text_encoder = TextEncoder(sizes.dim, rngs=rngs)
        self.blocks = nnx.List([Block(settings, mesh, rngs=rngs) for _ in range(sizes.layers)])
        self.head = Head(sizes.dim, numbers, rngs=rngs)

    @property
    def stream(self) -> ma.Stream | None:
        """The blocks of its videos; None where they are made all at once."""
        return self.settings.stream

    def cache(
        self, stream: ma.Stream, batch: int = 1, frames: int | None = None, **how: Any
    ) -> ma.KVCache:
        """Make an empty cache for the rollout of a stream.

        Args:
            stream: blocks, window and sink.
            batch: videos, twice as many with guidance.
            frames: the most that can be made, of a stream without a window.
            how: more for `KVCache.empty`.
        """
        model = self.settings.model
        sizes = {"layers": model.layers, "kv_heads": model.heads, "dim_head": model.dim_head}
        how = {"dtype": "float32", "mesh": self.mesh} | how
        return stream.cache(**sizes, batch=batch, frames=frames, **how)

    def encode(self, words: Words) -> tuple[KV, ...]:
        """Compute the keys and values of the prompts for every block, once for all steps."""
        c = self.text_encoder(words)
        return tuple(block.attn2.compute_kv(c) for block in self.blocks)

    def __call__(
        self,
        video: Video,
        t: Time,
        words: Words,
        kv: Sequence[KV] | None = None,
        *,
        cache: ma.KVCache | None = None,
        forcing: Forcing | None = None,
        positions: Int[Array, "*b F"] | None = None,
    ) -> Any:
        """Predict the velocity.

        Args:
            video: noisy videos; beside a cache, the block that it is at.
            t: their times, 0 (clean) to 1 (noise); beside a cache or forcing, of each frame.
            words: token ids of their prompts.
            kv: what `encode(words)` gave; default computed here.
            cache: keys and values of the frames before the block.
            forcing: the stream whose mask a clip is under, and the clean clip beside it.
            positions: numbers of the frames; default those from `cache.frame` on, or from 0 on.

        Returns:
            The velocity; beside a cache a pair, with the cache that holds this block's too.
        """
        (frames, height, width), padding = self._grid(video), padding_mask(words)
        check_call(video, t, (frames, height, width), cache, forcing, len(self.blocks))
        view = view_of(frames, self._rope, cache, forcing, self.mesh, positions)
        x, e, modulation = self._tokens(video, t, view, forcing)
        every = self.encode(words) if kv is None else kv
        x, cache = self._layers(x, modulation, every, padding, view)
        patches = self.head(view.noisy(x), view.noisy(e))
        velocity = unpatchify(patches, (frames, height, width), self.settings.model.patch)
        return velocity if cache is None else (velocity, cache)

    def _grid(self, video: Video) -> tuple[int, int, int]:
        _, height, width = self.settings.grid
        return video.shape[1] // self.settings.model.patch[0], height, width

    def _rope(self, frames: Any) -> ma.Rotary:
        model, (_, *sides) = self.settings.model, self.settings.grid
        return ma.rope_3d(model.dim_head, frames, *sides, theta=model.rope_theta)

    def _tokens(
        self, video: Video, t: Time, view: View, forcing: Forcing | None
    ) -> tuple[Tokens, Array, Array]:
        """Embed patches and times of a clip, and of the clean one that is paired with it."""
        clean = None if forcing is None else forcing.clean
        if forcing is not None and clean is not None:
            t_clean = jnp.zeros_like(t) if forcing.t_clean is None else forcing.t_clean
            t = view.pair(t_clean, t)
        e, modulation = self.time_embedding(t)
        x = self._patches(video)
        x = x if clean is None else view.pair(self._patches(clean), x)
        return x, e, modulation

    def _patches(self, video: Video) -> Tokens:
        x = self.patch_embedding(patchify(video, self.settings.model.patch))
        table = rearrange(self.position[...], "F H W D -> (F H W) D")
        if (blocks := x.shape[1] // len(table)) > 1:
            table = jnp.tile(table, (blocks, 1))
        return x + table

    def _layers(
        self, x: Tokens, modulation: Array, every: Sequence[KV], padding: Any, view: View
    ) -> tuple[Tokens, ma.KVCache | None]:
        run, cache = ma.remat(Block.__call__, self.settings), view.cache
        for index, (block, kv) in enumerate(zip(self.blocks, every, strict=True)):
            told = (x, modulation, view.rotary, kv, padding, view.mask)
            if cache is None:
                x = run(block, *told)
            else:
                x, cache = block(*told, cache.layer(index))
        return x, cache


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
