"""What attends to what in SDXL's UNet, as plans: for training and for sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import maxattn as ma

from .settings import Settings
from .sizes import Sizes


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    text: int,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, ma.Plan]:
    """Plan self- and cross-attention at every resolution that attends.

    Args:
        settings: of attention and of the model.
        sizes: of the UNet.
        batch: pictures in one call of the UNet.
        latents: [C, h, w] of one.
        text: tokens of a prompt.
        mesh: that it runs on.
    """
    found: dict[str, ma.Plan] = {}
    levels = range(len(sizes.attention_head_dim))
    for level in (level for level in levels if sizes.attends[level]):
        height, width = (side >> level for side in latents[1:])
        x, states = (_states(settings, sizes, level, batch, n) for n in (height * width, text))
        calls = {"self": ma.Call.of(x, x), "cross": ma.Call.of(x, states, role="cross")}
        for role, call in calls.items():
            found[f"{role} {height}x{width}"] = ma.plan(call, settings, mesh)
    return found


def _states(
    settings: Settings, sizes: Sizes, level: int, batch: int, length: int
) -> jax.ShapeDtypeStruct:
    """Describe the queries or keys of a resolution, [B, T, N, H]."""
    heads = sizes.attention_head_dim[level]
    shape = (batch, length, heads, sizes.block_out_channels[level] // heads)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(settings.model.dtype))
