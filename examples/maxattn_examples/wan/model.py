"""Wan's transformer: predict a velocity from a noisy latent video, time, text (and image).

    e = time;  c = text;  x = patches of the latents
    in each block:    (shift1, scale1, gate1, shift2, scale2, gate2) = table + modulation(e)
        x += gate1 * self_attention(norm(x) * (1 + scale1) + shift1)
        x += cross_attention(norm(x), c [and the image])
        x += gate2 * ffn(norm(x) * (1 + scale2) + shift2)
    velocity = unpatchify(linear(norm(x) * (1 + scale) + shift)),  (shift, scale) = table + e

A video has one time, or one for each frame of tokens: Wan 2.2's TI2V model continues an image, the
first frame, whose time is 0, and a streaming model has clean frames beside noisy ones. With a cache
the call computes one block of a video; with forcing, a clip under a stream's mask.

Axes: B batch, T tokens, S tokens of text or image, D width, L layers; F, H, W, C frames, rows,
columns, channels of the latents.

Source: Wan 2.1 and 2.2, https://arxiv.org/abs/2503.20314; parameter names are those of diffusers.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

import maxattn as ma
from maxattn import sharding
from maxattn.errors import InputError
from maxattn.modules import KV, adaptive_norm
from maxattn.steps import Layers, are_stacked, count_layers, run_layers
from maxattn_examples.common.compiled import make_layers, map_layers
from maxattn_examples.common.forcing import Forcing, View, check_call, view_of
from maxattn_examples.common.layers import left_open, norm32, residual, rows_of

from .block import Block, Conditions, Config, Time, Tokens, table
from .settings import Sizes

Latents = Float[Array, "B F H W C"]
LayersKV = KV | tuple[KV, ...]


class WanTransformer3D(nnx.Module):
    """Predict the velocity of noisy latents.

    Args:
        sizes: `SIZES[...]`, or `Sizes.of_folder(...)`.
        config: attention's settings; its `remat_policy` chooses what each block saves in training.
        dtype: of the computation, default float32; norms, modulation and softmax are always
            float32.
        param_dtype: of the parameters, default float32; norms and modulation tables are always
            float32.
        scan_layers: True (default) stacks the blocks' parameters and scans, so that a block
            compiles
            once. False compiles each block, with weights of its own.
    """

    diffusers_stacked: ClassVar[tuple[str, ...]] = ("blocks",)
    # Published files have it, but no model reads it.
    diffusers_ignored: ClassVar[tuple[str, ...]] = ("norm_added_q",)

    def __init__(
        self,
        sizes: Sizes,
        config: Config = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        scan_layers: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.sizes, self.config, self.mesh, self.dtype = sizes, config, mesh, dtype
        patch = sizes.patch_size
        patches: dict[str, Any] = {"strides": patch, "padding": "VALID", "rngs": rngs, **how}
        self.patch_embedding = nnx.Conv(sizes.in_channels, sizes.dim, patch, **patches)
        self.condition_embedder = Conditions(sizes, rngs=rngs, **how)
        self.blocks = make_layers(
            lambda rngs: Block(sizes, config, mesh, rngs=rngs, **how),
            sizes.num_layers,
            rngs,
            scan_layers,
        )
        self.norm_out = norm32(sizes.dim, sizes.eps, False, rngs)
        numbers = sizes.out_channels * math.prod(patch)
        self.proj_out = nnx.Linear(sizes.dim, numbers, rngs=rngs, **how)
        self.scale_shift_table = table(2, sizes.dim, rngs)

    def encode(
        self, text: Float[Array, "B S C"], image: Float[Array, "B S2 C2"] | None = None
    ) -> LayersKV:
        """Compute every block's keys and values of a text (and image), once for all steps.

        Args:
            text: states of the text encoder, [B, S, text_dim].
            image: states of the image encoder, [B, S', image_dim], for an image-to-video model.

        Returns:
            A `KV` whose arrays have a leading axis of layers, or one per layer if they are not
                scanned.
        """
        self._check_image(image)
        c = self.condition_embedder.text(text.astype(self.dtype))
        i = None if image is None else self.condition_embedder.image(image.astype(self.dtype))
        return map_layers(lambda block: block.attn2.compute_kv(c, i), self.blocks)

    def cache(
        self, stream: ma.Stream, batch: int = 1, frames: int | None = None, **how: Any
    ) -> ma.KVCache:
        """Make an empty cache for this model.

        Args:
            stream: blocks, window and sink.
            frames: number of slots, for a stream without a window.
        """
        sizes = self.sizes
        return stream.cache(
            layers=sizes.num_layers,
            batch=batch,
            kv_heads=sizes.num_attention_heads,
            dim_head=sizes.attention_head_dim,
            frames=frames,
            per_layer=not are_stacked(self.blocks),
            **{"dtype": jnp.dtype(self.dtype).name, "mesh": self.mesh, **how},
        )

    @overload
    def __call__(
        self,
        latents: Latents,
        t: Float[Array, " B"] | Float[Array, "B F"],
        text: Float[Array, "B S C"] | None = None,
        image: Float[Array, "B S2 C2"] | None = None,
        kv: LayersKV | None = None,
        *,
        cache: None = None,
        forcing: Forcing | None = None,
        positions: Int[Array, "*b F"] | None = None,
    ) -> Latents: ...
    @overload
    def __call__(
        self,
        latents: Latents,
        t: Float[Array, "B F"],
        text: Float[Array, "B S C"] | None = None,
        image: Float[Array, "B S2 C2"] | None = None,
        kv: LayersKV | None = None,
        *,
        cache: ma.KVCache,
        forcing: Forcing | None = None,
        positions: Int[Array, "*b F"] | None = None,
    ) -> tuple[Latents, ma.KVCache]: ...
    def __call__(
        self,
        latents: Latents,
        t: Float[Array, " B"] | Float[Array, "B F"],
        text: Float[Array, "B S C"] | None = None,
        image: Float[Array, "B S2 C2"] | None = None,
        kv: LayersKV | None = None,
        *,
        cache: ma.KVCache | None = None,
        forcing: Forcing | None = None,
        positions: Int[Array, "*b F"] | None = None,
    ) -> Any:
        """Predict the velocity.

        Args:
            latents: noisy; for image-to-video, the condition's channels follow. With a cache that
                streams, its current block.
            t: times, 0 (clean) to 1000 (noise), of each video or of each frame of its tokens; with
                a
                cache or forcing, of each frame.
            text, image: as for `encode`; None if `kv` is given.
            kv: from `encode`.
            cache: keys and values of earlier frames; the result is then a pair, with a cache that
                has
                this block's too. Its `advance` moves to the next block.
            forcing: a stream whose mask applies to the clip; if it has a clean clip, the velocity
                is the
                noisy clip's.
            positions: numbers of the frames of tokens; default from `cache.frame`, or from 0.

        Raises:
            InputError: an argument does not fit the model or the others.
        """
        _check_text(text, image, kv)
        grid = self._grid(latents)
        check_call(latents, t, grid, cache, forcing, self.sizes.num_layers)
        kv = self.encode(text, image) if text is not None else kv

        def rope(frames: Any) -> ma.Rotary:
            sizes = self.sizes
            return ma.rope_3d(sizes.attention_head_dim, frames, *grid[1:], theta=sizes.rope_theta)

        view = view_of(grid[0], rope, cache, forcing, self.mesh, positions)
        x, time = self._tokens(latents, _times(t, grid[0]), view, forcing)
        x, cache = self._layers(x, time, kv, view)
        e = view.noisy(time.embedding)
        velocity = self._head(view.noisy(x), e, grid)
        return velocity if cache is None else (velocity, cache)

    def _tokens(
        self, latents: Latents, t: Float[Array, "B F"], view: View, forcing: Forcing | None
    ) -> tuple[Tokens, Time]:
        """Embed the patches and times of a clip, and of its clean clip if there is one."""
        x, clean = self._patches(latents), None if forcing is None else forcing.clean
        if forcing is not None and clean is not None:
            t_clean = jnp.zeros_like(t) if forcing.t_clean is None else forcing.t_clean
            x, t = view.pair(self._patches(clean), x), view.pair(t_clean.astype(t.dtype), t)
        return sharding.constrain(x, self.mesh, "BT."), self.condition_embedder.time(t)

    def _patches(self, latents: Latents) -> Tokens:
        """Embed patches: a convolution without overlap, as a matmul.

        For a convolution XLA for GPUs would choose a channels-first layout, for all layers too.
        """
        grid = dict(zip("fhw", self.sizes.patch_size, strict=True))
        patches = "B (F f) (H h) (W w) C -> B (F H W) (f h w C)"
        x = rearrange(latents.astype(self.dtype), patches, **grid)
        kernel, bias = self.patch_embedding.kernel, self.patch_embedding.bias
        assert bias is not None, "it is built with one"
        kernel, bias = (p.get_value().astype(self.dtype) for p in (kernel, bias))
        return x @ kernel.reshape(-1, kernel.shape[-1]) + bias.reshape(1, 1, -1)

    def _layers(
        self, x: Tokens, time: Time, kv: Any, view: View
    ) -> tuple[Tokens, ma.KVCache | None]:
        """Run the blocks; a cache is the scan's carry if it is written, but not if it is read."""
        cache = view.cache
        seen, add = (view.rotary, view.mask), not left_open(self.blocks, self.config)
        if cache is not None and view.writes:

            def write(block: Block, carry: Any, kv: Any, number: Any) -> Any:
                (x, cache), (rotary, mask) = carry, seen
                return block(x, time.modulation, rotary, kv, mask, cache.layer(number), add)

            x, cache = run_layers(write, self.blocks, (x, cache), kv)
            return residual(x).total, cache
        run = ma.remat(Block.__call__, self.config)

        def step(block: Block, x: Any, kv: Any, number: Any) -> Any:
            layer = None if cache is None else cache.layer(number)
            rotary, mask = seen
            out = run(block, x, time.modulation, rotary, kv, mask, layer, add)
            return out if cache is None else out[0]

        def part(x: Tokens, span: range) -> Tokens:
            return residual(run_layers(step, self.blocks, x, kv, span)).total

        layers = Layers(count_layers(self.blocks), part, beside=time)
        return ma.blocks(layers, x), cache

    def _head(self, x: Tokens, e: Float[Array, "B F D"], grid: tuple[int, int, int]) -> Latents:
        times = e.astype(jnp.float32)[:, :, None]
        shift, scale = rows_of(jnp.repeat(times, 2, axis=2), self.scale_shift_table[...])
        x = self.proj_out(adaptive_norm(x, self.norm_out, scale, shift, mesh=self.mesh)[1])
        counts = dict(zip("FHWfhw", (*grid, *self.sizes.patch_size), strict=True))
        return rearrange(x, "B (F H W) (f h w C) -> B (F f) (H h) (W w) C", **counts)

    def _grid(self, latents: Latents) -> tuple[int, int, int]:
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


def _times(t: Array, frames: int) -> Float[Array, "B F"]:
    """Return the times as [B, F]; F is 1 if each video has one time."""
    if t.ndim == 1:
        return t[:, None]
    if t.shape[1:] != (frames,):
        rule = f"it has a time for each video, [B], or for each of {frames} frames of tokens"
        raise InputError("t", f"shape {tuple(t.shape)}", rule, f"pass [B] or [B, {frames}]")
    return t


def _check_text(text: Any, image: Any, kv: Any) -> None:
    if (text is None) == (kv is None):
        value = "None, and no kv" if text is None else "given, and kv too"
        rule = "the model takes exactly one of text and kv"
        raise InputError("text", value, rule, "pass text, or kv=encode(text)")
    if image is not None and kv is not None:
        rule = "kv contains the keys and values of the text, and of the image that it came with"
        remedy = "pass kv=encode(text, image), and no image"
        raise InputError("image", "given beside kv", rule, remedy)
