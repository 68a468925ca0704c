"""The models to measure, at real size: the shapes of their inputs, a prediction, a loss.

`wan`, `sdxl` and `flux` take the settings of attention; the examples of a step, with their height
and width in pixels; the sizes of the model, by default those of its published weights; the tokens
of a prompt; and whether the model's layers are scanned, or None for the default of the examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float
from maxattn_examples.common.compiled import scan_here
from maxattn_examples.flux.model import FluxTransformer2D
from maxattn_examples.flux.settings import PATCH
from maxattn_examples.flux.settings import Sizes as FluxSizes
from maxattn_examples.sdxl.settings import SIZE_NUMBERS
from maxattn_examples.sdxl.settings import Sizes as UNetSizes
from maxattn_examples.sdxl.unet import UNet
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import SIZES, Sizes

import maxattn as ma

Inputs = dict[str, Any]
LATENT = 8  # pixels along a side of a latent, in every autoencoder but that of Wan 2.2's TI2V
WIDE_LATENT = 16  # the same in TI2V's, whose latents have 48 channels
WIDE_CHANNELS = 48
FRAMES = 4  # frames of a video in each latent frame after the first


@dataclass(frozen=True)
class Workload:
    """A model and its inputs, before anything runs.

    Args:
        name: the model and its sizes.
        make: builds the model from the dtypes of computation and of parameters.
        shapes: shapes of the inputs by name; a step changes "latents".
        once: computes from the inputs what all denoising steps share.
        predict: runs the model on latents, times and the result of `once`.
        noisy: mixes latents and noise at times from 0 to 1; returns the mix and the model's target.
        tokens: tokens that a step processes.
    """

    name: str
    make: Callable[[Any, Any], nnx.Module]
    shapes: dict[str, tuple[int, ...]]
    once: Callable[[Any, Inputs], Inputs]
    predict: Callable[[Any, Array, Array, Inputs], Array]
    noisy: Callable[[Array, Array, Array], tuple[Array, Array]]
    tokens: int

    def loss(self, model: nnx.Module, inputs: Inputs, key: Array) -> Float[Array, ""]:
        """Return the mean squared error at random times, with random noise."""
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
    scan_layers: bool | None = True,
) -> Workload:
    """Describe Wan: flow matching of a video with `frames`.

    Wan 2.2's TI2V gets a time for each frame, as it does to continue an image.
    """
    wide = sizes.in_channels == WIDE_CHANNELS
    side = WIDE_LATENT if wide else LATENT
    sides = ((frames - 1) // FRAMES + 1, height // side, width // side)

    def predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
        times = jnp.broadcast_to(t[:, None], (len(t), sides[0])) if wide else t
        return model(x, times, inputs.get("text"), kv=inputs.get("kv"))

    model = f"Wan, {sizes.num_layers} layers of width {sizes.dim}"
    return Workload(
        name=f"{model}, {width}x{height}, {frames} frames, batch {batch}",
        make=partial(_made, WanTransformer3D, sizes, config, scan_layers),
        shapes={
            "latents": (batch, *sides, sizes.in_channels),
            "text": (batch, text, sizes.text_dim),
        },
        once=lambda model, inputs: {"kv": model.encode(inputs["text"])},
        predict=predict,
        noisy=_flow,
        tokens=batch * math.prod(n // p for n, p in zip(sides, sizes.patch_size, strict=True)),
    )


def sdxl(
    config: ma.AttentionConfig,
    batch: int,
    height: int,
    width: int,
    sizes: UNetSizes | None = None,
    text: int = 77,
    scan_layers: bool | None = True,
) -> Workload:
    """Describe SDXL's UNet, which predicts the noise."""
    sizes = sizes or UNetSizes()
    rows, columns = height // LATENT, width // LATENT

    def once(model: Any, inputs: Inputs) -> Inputs:
        given = {key: inputs[key] for key in ("pooled", "picture")}
        return {"kv": model.encode(inputs["text"]), **given}

    def predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
        given = inputs["pooled"], inputs["picture"], inputs.get("kv")
        return model(x, t, inputs.get("text"), *given)

    def noisy(x: Array, noise: Array, at: Array) -> tuple[Array, Array]:
        return jnp.cos(jnp.pi / 2 * at) * x + jnp.sin(jnp.pi / 2 * at) * noise, noise

    channels = "-".join(map(str, sizes.block_out_channels))
    return Workload(
        name=f"SDXL UNet, {channels} channels, {width}x{height}, batch {batch}",
        make=partial(_made, UNet, sizes, config, scan_layers),
        shapes={
            "latents": (batch, rows, columns, sizes.in_channels),
            "text": (batch, text, sizes.cross_attention_dim),
            "pooled": (batch, sizes.pooled_dim),
            "picture": (batch, SIZE_NUMBERS),
        },
        once=once,
        predict=predict,
        noisy=noisy,
        tokens=batch * rows * columns // 4,
    )


def flux(
    config: ma.AttentionConfig,
    batch: int,
    height: int,
    width: int,
    sizes: FluxSizes | None = None,
    text: int = 512,
    scan_layers: bool | None = True,
) -> Workload:
    """Describe Flux.1: flow matching of pictures."""
    sizes = sizes or FluxSizes()
    rows, columns = height // LATENT, width // LATENT

    def predict(model: Any, x: Array, t: Array, inputs: Inputs) -> Array:
        guidance = jnp.full(len(x), 3.5) if sizes.guidance_embeds else None
        return model(x, t, inputs["text"], inputs["pooled"], guidance)

    layers = f"{sizes.num_layers} + {sizes.num_single_layers} layers of width {sizes.dim}"
    return Workload(
        name=f"Flux.1, {layers}, {width}x{height}, batch {batch}",
        make=partial(_made, FluxTransformer2D, sizes, config, scan_layers),
        shapes={
            "latents": (batch, rows, columns, sizes.channels),
            "text": (batch, text, sizes.joint_attention_dim),
            "pooled": (batch, sizes.pooled_projection_dim),
        },
        once=lambda model, inputs: {name: inputs[name] for name in ("text", "pooled")},
        predict=predict,
        noisy=_flow,
        tokens=batch * (rows // PATCH) * (columns // PATCH),
    )


def _made(
    model: Any,
    sizes: Any,
    config: ma.AttentionConfig,
    scan_layers: bool | None,
    dtype: Any,
    param_dtype: Any,
) -> nnx.Module:
    how: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
    return model(sizes, config, rngs=nnx.Rngs(0), scan_layers=scan_here(scan_layers), **how)


def _flow(x: Array, noise: Array, at: Array) -> tuple[Array, Array]:
    return (1 - at) * x + at * noise, noise - x
