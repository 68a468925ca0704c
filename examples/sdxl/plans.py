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
    dtype, found = jnp.dtype(settings.model.dtype), {}
    for level, heads in enumerate(sizes.attention_head_dim):
        if not sizes.attends[level]:
            continue
        height, width = (side >> level for side in latents[1:])
        shape = (heads, sizes.block_out_channels[level] // heads)
        x, states = (
            jax.ShapeDtypeStruct((batch, length, *shape), dtype)
            for length in (height * width, text)
        )
        calls = {"self": ma.Call.of(x, x), "cross": ma.Call.of(x, states, role="cross")}
        found |= {
            f"{role} {height}x{width}": ma.plan(call, settings, mesh)
            for role, call in calls.items()
        }
    return found
