"""A small Wan that streams, and clips for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import Sizes

import maxattn as ma
from tests.moved import moved

SMALL = {
    "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "ffn_dim": 32,
    "in_channels": 4, "out_channels": 4, "text_dim": 8, "freq_dim": 16,
}  # fmt: skip
SIZES = Sizes(**SMALL)
SIDES, TOKENS = (2, 4), 2  # of a frame of latents; its tokens


def small(mesh: Any = None, **how: Any) -> WanTransformer3D:
    """Build the model with random parameters, because many initial ones are 0 or 1."""
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
    """Give every frame of the noisy clip its own time, even within a block."""
    return jnp.broadcast_to(300.0 + 40.0 * (jnp.arange(frames) % 7), (batch, frames))


def empty(stream: ma.Stream, frames: int, batch: int = 1, **how: Any) -> ma.KVCache:
    """Make a cache of the model for so many frames."""
    sizes = {"layers": 2, "batch": batch, "kv_heads": 2, "dim_head": 12, "dtype": "float32"}
    slots = None if stream.window else frames
    return stream.cache(**{**sizes, "frames": slots, **how})
