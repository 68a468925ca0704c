"""Measured programs: a model at its real size, the shapes of its inputs, a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from maxattn_examples.flux.model import FluxTransformer2D
from maxattn_examples.flux.sizes import PATCH
from maxattn_examples.flux.sizes import Sizes as FluxSizes
from maxattn_examples.sdxl.sizes import SIZE_NUMBERS
from maxattn_examples.sdxl.sizes import Sizes as UNetSizes
from maxattn_examples.sdxl.unet import UNet
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.sizes import SIZES, Sizes

import maxattn as ma

Inputs = dict[str, Any]
LATENT = 8  # pixels of a side to one latent, in all autoencoders but the next
WIDE_LATENT = 16  # the same in that of Wan 2.2's TI2V, whose latents have 48 channels
WIDE_CHANNELS = 48
FRAMES = 4  # frames of a video to one latent after the first


@dataclass(frozen=True)
class Workload:
    """Describe a step without running it.

    Args:
        name: of the model and its sizes.
        make: builds the model in a dtype for computing and one for parameters.
        shapes: of the inputs, by name; "latents" is what a step changes.
        once: makes of inputs what every denoising step shares.
        predict: runs the model on latents, times and what `once` made.
        noisy: mixes latents and noise at times from 0 to 1; returns that and what the model should
            predict.
        tokens: that a step processes, for tokens a second.
    """

    name: str
    make: Callable[[Any, Any], nnx.Module]
    shapes: dict[str, tuple[int, ...]]
    once: Callable[[Any, Inputs], Inputs]
    predict: Callable[[Any, Array, Array, Inputs], Array]
    noisy: Callable[[Array, Array, Array], tuple[Array, Array]]
    tokens: int

    def loss(self, model: nnx.Module, inputs: Inputs, key: Array) -> Float[Array, ""]:
        """Compute the mean squared error of a prediction at random times with random noise."""
        x = inputs["latents"]
        at, noise = jax.random.uniform(key, x.shape[:1]), jax.random.normal(key, x.shape)
        noisy, target = self.noisy(x, noise, at.reshape(-1, *[1] * (x.ndim - 1)))
        got = self.predict(model, noisy, 1000.0 * at, inputs)
        return jnp.mean(jnp.square(got.astype(jnp.float32) - target))


def wan(
    config: ma.AttentionConfig,
    batch: int,
    height: int,
    width: int,
    frames: int,
    sizes: Sizes = SIZES["wan-2.1-t2v-1.3b"],
    text: int = 512,
    scan_layers: bool = True,
) -> Workload:
    """Describe Wan: flow matching of a latent video.

    Wan 2.2's TI2V gets a time for each frame, as where it continues an image.

    Args:
        config: attention's settings.
        batch: videos.
        height, width, frames: of a video, in pixels and frames.
        sizes: of the model.
        text: tokens of a prompt.
        scan_layers: whether the model's blocks are.
    """
    wide = sizes.in_channels == WIDE_CHANNELS
    side = WIDE_LATENT if wide else LATENT
    sides = ((frames - 1) // FRAMES + 1, height // side, width // side)

    def predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
        times = jnp.broadcast_to(t[:, None], (len(t), sides[0])) if wide else t
        return model(x, times, inputs.get("text"), kv=inputs.get("kv"))

    def make(dtype: Any, param_dtype: Any) -> nnx.Module:
        how = {"dtype": dtype, "param_dtype": param_dtype, "scan_layers": scan_layers}
        return WanTransformer3D(sizes, config, rngs=nnx.Rngs(0), **how)

    model = f"Wan, {sizes.num_layers} layers of width {sizes.dim}"
    return Workload(
        name=f"{model}, {width}x{height}, {frames} frames, batch {batch}",
        make=make,
        shapes={
            "latents": (batch, *sides, sizes.in_channels),
            "text": (batch, text, sizes.text_dim),
        },
        once=lambda model, inputs: {"kv": model.encode(inputs["text"])},
        predict=predict,
        noisy=lambda x, noise, at: ((1 - at) * x + at * noise, noise - x),
        tokens=batch * math.prod(n // p for n, p in zip(sides, sizes.patch_size, strict=True)),
    )


def sdxl(
    config: ma.AttentionConfig,
    batch: int,
    height: int,
    width: int,
    sizes: UNetSizes | None = None,
    text: int = 77,
    scan_layers: bool = True,
) -> Workload:
    """Describe SDXL's UNet: prediction of the noise of latents.

    Args:
        config: attention's settings.
        batch: pictures.
        height, width: of a picture, in pixels.
        sizes: of the model; default SDXL base 1.0.
        text: tokens of a prompt.
        scan_layers: whether the model's blocks are.
    """
    sizes = sizes or UNetSizes()
    rows, columns = height // LATENT, width // LATENT

    def make(dtype: Any, param_dtype: Any) -> nnx.Module:
        how = {"dtype": dtype, "param_dtype": param_dtype, "scan_layers": scan_layers}
        return UNet(sizes, config, rngs=nnx.Rngs(0), **how)

    channels = "-".join(map(str, sizes.block_out_channels))
    return Workload(
        name=f"SDXL UNet, {channels} channels, {width}x{height}, batch {batch}",
        make=make,
        shapes={
            "latents": (batch, rows, columns, sizes.in_channels),
            "text": (batch, text, sizes.cross_attention_dim),
            "pooled": (batch, sizes.pooled_dim),
            "picture": (batch, SIZE_NUMBERS),
        },
        once=_once,
        predict=_predict,
        noisy=_noisy,
        tokens=batch * rows * columns // 4,
    )


def flux(
    config: ma.AttentionConfig,
    batch: int,
    height: int,
    width: int,
    sizes: FluxSizes | None = None,
    text: int = 512,
    scan_layers: bool = True,
) -> Workload:
    """Describe Flux.1: flow matching of latents.

    Args:
        config: attention's settings.
        batch: pictures.
        height, width: of a picture, in pixels.
        sizes: of the model; default FLUX.1-dev.
        text: tokens of a prompt.
        scan_layers: whether the model's blocks are.
    """
    sizes = sizes or FluxSizes()
    rows, columns = height // LATENT, width // LATENT

    def make(dtype: Any, param_dtype: Any) -> nnx.Module:
        how = {"dtype": dtype, "param_dtype": param_dtype, "scan_layers": scan_layers}
        return FluxTransformer2D(sizes, config, rngs=nnx.Rngs(0), **how)

    def predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
        guidance = jnp.full(len(x), 3.5) if sizes.guidance_embeds else None
        return model(x, t, inputs["text"], inputs["pooled"], guidance)

    layers = f"{sizes.num_layers} + {sizes.num_single_layers} layers of width {sizes.dim}"
    return Workload(
        name=f"Flux.1, {layers}, {width}x{height}, batch {batch}",
        make=make,
        shapes={
            "latents": (batch, rows, columns, sizes.channels),
            "text": (batch, text, sizes.joint_attention_dim),
            "pooled": (batch, sizes.pooled_projection_dim),
        },
        once=lambda model, inputs: {name: inputs[name] for name in ("text", "pooled")},
        predict=predict,
        noisy=lambda x, noise, at: ((1 - at) * x + at * noise, noise - x),
        tokens=batch * (rows // PATCH) * (columns // PATCH),
    )


def _once(model: Any, inputs: Inputs) -> Inputs:
    told = {key: inputs[key] for key in ("pooled", "picture")}
    return {"kv": model.encode(inputs["text"]), **told}


def _predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
    told = (inputs.get("text"), inputs["pooled"], inputs["picture"], inputs.get("kv"))
    return model(x, t, *told)


def _noisy(x: Array, noise: Array, at: Array) -> tuple[Array, Array]:
    return jnp.cos(jnp.pi / 2 * at) * x + jnp.sin(jnp.pi / 2 * at) * noise, noise
