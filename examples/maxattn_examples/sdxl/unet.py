"""SDXL's UNet: predict the noise (or v) from noisy latents, time, text and the picture's sizes.

On the way down each resolution has residual blocks, and all but the finest attention after each.
The way up mirrors them, and concatenates the outputs of the way down. Channels come last; parameter
names are those of diffusers.

Source: Podell et al., https://arxiv.org/abs/2307.01952
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import InputError
from maxattn.steps import Layers
from maxattn_examples.common.layers import Embedding, sinusoids
from maxattn_examples.common.shapes import fits

from .blocks import (
    Config,
    Downsample,
    Image,
    LayersKV,
    Mesh,
    ResnetBlock,
    Text,
    Transformer,
    Upsample,
    activated,
    conv3,
    group_norm,
)
from .settings import SIZE_NUMBERS, Sizes


class Level(nnx.Module):
    """One resolution: residual blocks, each with attention if any, and a change of resolution."""

    def __init__(self, resnets: list, attentions: list, down: Any = None, up: Any = None) -> None:
        self.resnets, self.attentions = nnx.List(resnets), nnx.List(attentions)
        self.downsamplers = nnx.List([down] if down else [])
        self.upsamplers = nnx.List([up] if up else [])


class Told(NamedTuple):
    """The inputs of every block."""

    e: Float[Array, "B E"]  # embedding of time, picture and pooled text
    text: Text | None  # states of the text; None if `kv` is given
    kv: Mapping[int, LayersKV]  # the text's keys and values, by `id` of the attention module

    def run(self, resnet: ResnetBlock, attention: Transformer | None, x: Image) -> Image:
        """Run a residual block, and the attention after it if there is one."""
        x = resnet(x, self.e)
        return x if attention is None else attention(x, self.text, self.kv.get(id(attention)))


class UNet(nnx.Module):
    """Predict the noise (or v) of noisy latents.

    Args:
        sizes: default SDXL base 1.0.
        config: attention's settings; its `remat_policy` chooses what each attention block saves in
            training.
        dtype: of the computation, default float32; norms and softmax are always float32.
        param_dtype: of the parameters, default float32; those of norms are always float32.
        scan_layers: True (default) stacks the attention blocks of a place and scans, so that one of
            them compiles. False compiles each, with weights of its own.
    """

    def __init__(
        self,
        sizes: Sizes | None = None,
        config: Config = None,
        mesh: Mesh = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        scan_layers: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = sizes or Sizes()
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.sizes, self.dtype = sizes, dtype
        channels = sizes.block_out_channels
        first, last = channels[0], channels[-1]
        resnet = partial(ResnetBlock, sizes=sizes, **how)
        attention = partial(_transformer, sizes, (config, mesh, scan_layers), how)
        levels, parts = range(len(channels)), (sizes, resnet, attention, how)
        added = sizes.projection_class_embeddings_input_dim
        self.conv_in = conv3(sizes.in_channels, first, **how)
        self.time_embedding = Embedding(first, sizes.time_dim, gelu=False, **how)
        self.add_embedding = Embedding(added, sizes.time_dim, gelu=False, **how)
        self.down_blocks = nnx.List([_down(i, *parts) for i in levels])
        middle = [resnet(last, last), resnet(last, last)]
        self.mid_block = Level(middle, [attention(len(channels) - 1)])
        self.up_blocks = nnx.List([_up(i, *parts) for i in reversed(levels)])
        self.conv_norm_out = group_norm(first, sizes, sizes.norm_eps, rngs)
        self.conv_out = conv3(first, sizes.out_channels, **how)

    def encode(self, text: Text) -> tuple[LayersKV, ...]:
        """Compute the text's keys and values for every cross-attention, once for all steps.

        Args:
            text: states of both text encoders, [B, S, cross_attention_dim].

        Returns:
            The results of `Transformer.encode`, in the order of the forward.
        """
        text = text.astype(self.dtype)
        return tuple(transformer.encode(text) for transformer in self._transformers())

    def __call__(
        self,
        latents: Image,
        t: Float[Array, " B"],
        text: Text | None,
        pooled: Float[Array, "B P"],
        picture: Float[Array, "B 6"],
        kv: tuple[LayersKV, ...] | None = None,
    ) -> Image:
        """Predict the noise (or v).

        Args:
            latents: noisy, [B, H, W, in_channels]; H and W divide by 2 at every change of
                resolution.
            t: times, 0 to 1000.
            text: states of both text encoders, [B, S, cross_attention_dim]; None if `kv` is given.
            kv: the text's keys and values, from `encode`.
            pooled: pooled states of the second encoder, [B, P].
            picture: original height and width, top and left of the crop, wanted height and width,
                in pixels.
        """
        self._check(latents, pooled, picture)
        self._check_text(text, kv)
        e = self._embed(t, pooled, picture)
        text = None if text is None else text.astype(self.dtype)
        told = Told(e, text, dict(zip(map(id, self._transformers()), kv or (), strict=False)))
        x = self.conv_in(latents.astype(self.dtype))
        kept = [x, told.run(*_places(self.down_blocks[0])[0], x)]
        deep = Layers(1, lambda x, _: self._deep(x, list(kept), told), add=False, beside=e)
        x = ma.blocks(deep, kept[-1])
        for resnet, attention in _places(self.up_blocks[-1])[-len(kept) :]:
            x = told.run(resnet, attention, jnp.concatenate([x, kept.pop()], axis=-1))
        return self.conv_out(activated(self.conv_norm_out, x))

    def _deep(self, x: Image, kept: list[Image], told: Told) -> Image:
        """Run the blocks between the outermost one on the way down and those on the way up."""
        outer = len(kept)
        for n, level in enumerate(self.down_blocks):
            for place in _places(level)[0 if n else 1 :]:
                x = told.run(*place, x)
                kept.append(x)
            for down in level.downsamplers:
                x = down(x)
                kept.append(x)
        first, second = self.mid_block.resnets
        x = second(told.run(first, self.mid_block.attentions[0], x), told.e)
        for level in self.up_blocks:
            for resnet, attention in _places(level):
                if len(kept) == outer:
                    return x
                x = told.run(resnet, attention, jnp.concatenate([x, kept.pop()], axis=-1))
            for up in level.upsamplers:
                x = up(x)
        return x

    def _transformers(self) -> Iterator[Transformer]:
        for level in (*self.down_blocks, self.mid_block, *self.up_blocks):
            yield from level.attentions

    def _embed(self, t: Array, pooled: Array, picture: Array) -> Float[Array, "B E"]:
        e = self.time_embedding(sinusoids(t, self.sizes.block_out_channels[0]).astype(self.dtype))
        numbers = sinusoids(picture.reshape(-1), self.sizes.addition_time_embed_dim)
        numbers = numbers.reshape(picture.shape[0], -1).astype(pooled.dtype)
        added = jnp.concatenate([pooled, numbers], -1).astype(self.dtype)
        return e + self.add_embedding(added)

    def _check_text(self, text: Any, kv: Any) -> None:
        if (text is None) == (kv is None):
            value = "None, and no kv" if text is None else "given, and kv too"
            rule = "the UNet takes exactly one of text and kv"
            raise InputError("text", value, rule, "pass text, or kv=encode(text)")
        wanted = sum(1 for _ in self._transformers())
        if kv is not None and len(kv) != wanted:
            rule = f"this UNet needs one for each of its {wanted} cross-attentions"
            remedy = "make it with this UNet's encode(text)"
            raise InputError("kv", f"{len(kv)} of them", rule, remedy)

    def _check(self, latents: Array, pooled: Array, picture: Array) -> None:
        multiple = 2 ** (len(self.sizes.block_out_channels) - 1)
        form = ("B", f"{multiple} H", f"{multiple} W", self.sizes.in_channels)
        if not fits(latents.shape, form):
            value, channels = f"shape {tuple(latents.shape)}", self.sizes.in_channels
            rule = f"it is [B, H, W, {channels}], with H and W multiples of {multiple}"
            raise InputError("latents", value, rule, "crop or pad it; channels come last")
        widths = {"pooled": (pooled, self.sizes.pooled_dim), "picture": (picture, SIZE_NUMBERS)}
        for name, (x, width) in widths.items():
            if x.shape != (latents.shape[0], width):
                rule = f"it is [B, {width}], with the B of the latents"
                value, remedy = f"shape {tuple(x.shape)}", "give one row for each example"
                raise InputError(name, value, rule, remedy)


def _places(level: Level) -> list[tuple[ResnetBlock, Transformer | None]]:
    """List the residual blocks of a level, each with the attention after it."""
    return list(zip_longest(level.resnets, level.attentions))


def _transformer(
    sizes: Sizes, run: tuple[Config, Mesh, bool], how: dict[str, Any], i: int
) -> Transformer:
    """Build the attention blocks of one place; `run` is config, mesh and `scan_layers`."""
    layers, heads = sizes.transformer_layers_per_block[i], sizes.attention_head_dim[i]
    return Transformer(sizes.block_out_channels[i], heads, layers, sizes, *run, **how)


def _down(i: int, sizes: Sizes, resnet: Any, attention: Any, how: dict[str, Any]) -> Level:
    channels = sizes.block_out_channels
    before, here = channels[max(i - 1, 0)], channels[i]
    resnets = [resnet(before if j == 0 else here, here) for j in range(sizes.layers_per_block)]
    attentions = [attention(i) for _ in resnets] if sizes.attends[i] else []
    last = i == len(channels) - 1
    return Level(resnets, attentions, down=None if last else Downsample(here, **how))


def _up(i: int, sizes: Sizes, resnet: Any, attention: Any, how: dict[str, Any]) -> Level:
    channels, here = sizes.block_out_channels, sizes.block_out_channels[i]
    count = sizes.layers_per_block + 1
    # The first block takes what comes from the resolution below, the last one what the way down
    # had from the resolution above.
    below = [channels[min(i + 1, len(channels) - 1)]] + [here] * (count - 1)
    beside = [here] * (count - 1) + [channels[max(i - 1, 0)]]
    resnets = [resnet(a + b, here) for a, b in zip(below, beside, strict=True)]
    attentions = [attention(i) for _ in resnets] if sizes.attends[i] else []
    return Level(resnets, attentions, up=None if i == 0 else Upsample(here, **how))
