"""SDXL's UNet: noisy latents, their time, a text and the picture's sizes in; the noise (or v) out.

On the way down each resolution has residual blocks, and all but the finest attention after each; on
the way up the same, beside what the way down left. Channels come last; parameter names are those of
diffusers.

Source: Podell et al., https://arxiv.org/abs/2307.01952
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import repeat, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.errors import InputError
from maxattn.modules import KV

from .attention import Text, Transformer
from .layers import (
    Downsample,
    Embedding,
    Image,
    ResnetBlock,
    Upsample,
    activated,
    conv3,
    group_norm,
    sinusoids,
)
from .sizes import Sizes

SIZE_NUMBERS = (
    6  # height and width of the original, top and left of the crop, height and width wanted
)


class Level(nnx.Module):
    """Hold one resolution: residual blocks, attention after each where there is any, and a change
    of resolution.
    """

    def __init__(
        self,
        resnets: list,
        attentions: list,
        down: Downsample | None = None,
        up: Upsample | None = None,
    ) -> None:
        self.resnets, self.attentions = nnx.List(resnets), nnx.List(attentions)
        self.downsamplers = nnx.List([down] if down else [])
        self.upsamplers = nnx.List([up] if up else [])


class UNet(nnx.Module):
    """Predict the noise (or v) of noisy latents.

    Args:
        sizes: default SDXL base 1.0.
        config: attention's settings; its `remat_policy` governs what a training step keeps of each
            attention block.
        mesh: devices to compute on; default the one there is.
        dtype: of the computation; norms and softmax are float32 whatever it is. Default float32.
        param_dtype: of the parameters; those of norms stay float32. Default float32.
        rngs: source of the initial parameters.
    """

    def __init__(
        self,
        sizes: Sizes | None = None,
        config: ma.AttentionConfig | None = None,
        mesh: jax.sharding.Mesh | None = None,
        *,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = sizes or Sizes()
        how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.sizes, self.dtype = sizes, dtype
        channels, first, last = (
            sizes.block_out_channels,
            sizes.block_out_channels[0],
            sizes.block_out_channels[-1],
        )
        resnet = partial(ResnetBlock, sizes=sizes, **how)
        attention = partial(_transformer, sizes, config, mesh, how)
        self.conv_in = conv3(sizes.in_channels, first, **how)
        self.time_embedding = Embedding(first, sizes.time_dim, **how)
        self.add_embedding = Embedding(
            sizes.projection_class_embeddings_input_dim, sizes.time_dim, **how
        )
        self.down_blocks = nnx.List(
            [_down(i, sizes, resnet, attention, how) for i in range(len(channels))]
        )
        middle = [resnet(last, last), resnet(last, last)]
        self.mid_block = Level(middle, [attention(len(channels) - 1)])
        self.up_blocks = nnx.List(
            [_up(i, sizes, resnet, attention, how) for i in reversed(range(len(channels)))]
        )
        self.conv_norm_out = group_norm(first, sizes, sizes.norm_eps, rngs)
        self.conv_out = conv3(first, sizes.out_channels, **how)

    def encode(self, text: Text) -> tuple[KV, ...]:
        """Compute the keys and values of a text for every attention to it: once, not once a
        denoising step.

        Args:
            text: states of both text encoders, [B, S, cross_attention_dim].

        Returns:
            One `KV` for each of the UNet's `Transformer`s, in the order of the forward; its arrays
            have a leading axis of layers.
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
        kv: tuple[KV, ...] | None = None,
    ) -> Image:
        """Predict.

        Args:
            latents: noisy, [B, H, W, in_channels]; H and W divide by 2 at every change of
                resolution.
            t: times, 0 to 1000.
            text: states of both text encoders, [B, S, cross_attention_dim]; or None, and
            kv: what `encode` gave.
            pooled: pooled states of the second, [B, P].
            picture: original height and width, top and left of the crop, wanted height and width,
                in pixels.
        """
        self._check(latents, pooled, picture)
        self._check_text(text, kv)
        e = self._embed(t, pooled, picture)
        text = None if text is None else text.astype(self.dtype)
        known = repeat(None) if kv is None else iter(kv)
        x = self.conv_in(latents.astype(self.dtype))
        left = [x]
        for level in self.down_blocks:
            for resnet, attention in zip_longest(level.resnets, level.attentions):
                x = resnet(x, e)
                x = x if attention is None else attention(x, text, next(known))
                left.append(x)
            for down in level.downsamplers:
                x = down(x)
                left.append(x)
        first, second = self.mid_block.resnets
        x = second(self.mid_block.attentions[0](first(x, e), text, next(known)), e)
        for level in self.up_blocks:
            for resnet, attention in zip_longest(level.resnets, level.attentions):
                x = resnet(jnp.concatenate([x, left.pop()], axis=-1), e)
                x = x if attention is None else attention(x, text, next(known))
            for up in level.upsamplers:
                x = up(x)
        return self.conv_out(activated(self.conv_norm_out, x))

    def _transformers(self) -> Iterator[Transformer]:
        """Yield what attends to the text, in the order of the forward."""
        for level in (*self.down_blocks, self.mid_block, *self.up_blocks):
            yield from level.attentions

    def _embed(self, t: Array, pooled: Array, picture: Array) -> Float[Array, "B E"]:
        e = self.time_embedding(sinusoids(t, self.sizes.block_out_channels[0]).astype(self.dtype))
        numbers = sinusoids(picture.reshape(-1), self.sizes.addition_time_embed_dim).reshape(
            picture.shape[0], -1
        )
        return e + self.add_embedding(
            jnp.concatenate([pooled, numbers.astype(pooled.dtype)], -1).astype(self.dtype)
        )

    def _check_text(self, text: Any, kv: Any) -> None:
        if (text is None) == (kv is None):
            said = "None, and no kv" if text is None else "given, and kv too"
            rule = "the UNet takes exactly one of text and kv"
            raise InputError("text", said, rule, "pass text, or kv=encode(text)")
        wanted = sum(1 for _ in self._transformers())
        if kv is not None and len(kv) != wanted:
            rule = f"one for each of the {wanted} places where this UNet attends to a text"
            raise InputError(
                "kv", f"{len(kv)} of them", rule, "make it with this UNet's encode(text)"
            )

    def _check(self, latents: Array, pooled: Array, picture: Array) -> None:
        halvings = 2 ** (len(self.sizes.block_out_channels) - 1)
        if (
            latents.ndim != 4
            or latents.shape[3] != self.sizes.in_channels
            or any(n % halvings for n in latents.shape[1:3])
        ):
            rule = (
                f"it is [B, H, W, {self.sizes.in_channels}], with H and W multiples of {halvings}"
            )
            raise InputError(
                "latents",
                f"shape {tuple(latents.shape)}",
                rule,
                "crop or pad it; channels come last",
            )
        width = (
            self.sizes.projection_class_embeddings_input_dim
            - SIZE_NUMBERS * self.sizes.addition_time_embed_dim
        )
        for name, x, want in (("pooled", pooled, width), ("picture", picture, SIZE_NUMBERS)):
            if x.shape != (latents.shape[0], want):
                rule = f"it is [B, {want}], with the B of the latents"
                raise InputError(
                    name, f"shape {tuple(x.shape)}", rule, "give one row for each example"
                )


def _transformer(sizes: Sizes, config: Any, mesh: Any, how: dict[str, Any], i: int) -> Transformer:
    layers, heads = sizes.transformer_layers_per_block[i], sizes.attention_head_dim[i]
    return Transformer(sizes.block_out_channels[i], heads, layers, sizes, config, mesh, **how)


def _down(i: int, sizes: Sizes, resnet: Any, attention: Any, how: dict[str, Any]) -> Level:
    channels = sizes.block_out_channels
    before, here = channels[max(i - 1, 0)], channels[i]
    resnets = [resnet(before if j == 0 else here, here) for j in range(sizes.layers_per_block)]
    attentions = [attention(i) for _ in resnets] if sizes.attends[i] else []
    return Level(
        resnets, attentions, down=None if i == len(channels) - 1 else Downsample(here, **how)
    )


def _up(i: int, sizes: Sizes, resnet: Any, attention: Any, how: dict[str, Any]) -> Level:
    """Build the level of resolution i on the way up: its first block takes what comes from
    below.
    """
    channels = sizes.block_out_channels
    below, here, left = (
        channels[min(i + 1, len(channels) - 1)],
        channels[i],
        channels[max(i - 1, 0)],
    )
    count = sizes.layers_per_block + 1
    # The last of what the way down left came in with the channels of the resolution above.
    resnets = [
        resnet((below if j == 0 else here) + (left if j == count - 1 else here), here)
        for j in range(count)
    ]
    attentions = [attention(i) for _ in resnets] if sizes.attends[i] else []
    return Level(resnets, attentions, up=None if i == 0 else Upsample(here, **how))
