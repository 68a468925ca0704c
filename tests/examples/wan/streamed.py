"""A small Wan that streams, its clips, and its blocks made one by one."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from wan.model import WanTransformer3D
from wan.sizes import Sizes

import maxattn as ma
from tests.moved import moved

SMALL = {
    "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32,
    "in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 16,
}  # fmt: skip
SIZES = Sizes(**SMALL)
SIDES, TOKENS = (2, 4), 2  # of a frame of latents; its tokens


def small(mesh: Any = None, **how: Any) -> WanTransformer3D:
    """Build the model, every parameter random: new modulations and norms say little."""
    model = WanTransformer3D(SIZES, None, mesh, rngs=nnx.Rngs(0), **how)
    nnx.update(model, moved(nnx.state(model, nnx.Param)))
    return model


@cache
def plain() -> WanTransformer3D:
    """Build the model once, for one device."""
    return small()


def text(batch: int = 1, seed: int = 0) -> jax.Array:
    """Draw states of a text."""
    return jax.random.normal(jax.random.key(seed), (batch, 3, 8))


def clips(frames: int, batch: int = 1) -> tuple[jax.Array, jax.Array]:
    """Draw a clean clip and a noisy one."""
    shape = (2, batch, frames, *SIDES, 4)
    clean, noisy = jnp.asarray(np.random.default_rng(frames).normal(size=shape), jnp.float32)
    return clean, noisy


def times(frames: int, batch: int = 1) -> jax.Array:
    """Give every frame of the noisy clip a time; those of a block differ too."""
    return jnp.broadcast_to(300.0 + 40.0 * (jnp.arange(frames) % 7), (batch, frames))


def empty(stream: ma.Stream, frames: int, batch: int = 1, **how: Any) -> ma.KVCache:
    """Make a cache for the model and so many frames."""
    sizes = {"layers": 2, "batch": batch, "kv_heads": 2, "dim_head": 12, "dtype": "float32"}
    slots = None if stream.window else frames
    return stream.cache(**{**sizes, "frames": slots, **how})


def blocks(
    model: WanTransformer3D, stream: ma.Stream, clean: Any, noisy: Any, made: ma.KVCache
) -> Any:
    """Return the velocity of each noisy block, after a clean pass over those before it."""
    graph, parameters = nnx.split(model)
    kv = model.encode(text(clean.shape[0]))

    def run(parameters: Any, x: Any, t: Any, kv: Any, made: Any) -> Any:
        return nnx.merge(graph, parameters)(x, t, kv=kv, cache=made)

    step = jax.jit(run, donate_argnums=4)
    out, t = [], times(clean.shape[1], clean.shape[0])
    for start, stop in stream.blocks(clean.shape[1]):
        own = slice(start, stop)
        velocity, made = step(parameters, noisy[:, own], t[:, own], kv, made)
        _, made = step(parameters, clean[:, own], 0 * t[:, own], kv, made)
        made = made.advance()
        out.append(velocity)
    return jnp.concatenate(out, axis=1), step
