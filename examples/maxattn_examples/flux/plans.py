"""What attends to what in Flux.1, as a plan: for training and for sampling."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import maxattn as ma

from .settings import Settings
from .sizes import PATCH, Sizes


def tokens(latents: tuple[int, ...]) -> int:
    """Count the patches of a picture's latents, [C, h, w]."""
    _, height, width = latents
    return (height // PATCH) * (width // PATCH)


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    text: int,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, ma.Plan]:
    """Plan the attention of text and picture together, the same in every block.

    Args:
        settings: of attention and of the model.
        sizes: of the model.
        batch: pictures in one call of the model.
        latents: [C, h, w] of one.
        text: tokens of a prompt.
        mesh: that it runs on.
    """
    heads = (sizes.num_attention_heads, sizes.attention_head_dim)
    shape = (batch, text + tokens(latents), *heads)
    both = jax.ShapeDtypeStruct(shape, jnp.dtype(settings.model.dtype))
    return {"joint": ma.plan(ma.Call.of(both, both), settings, mesh)}
