"""What attends to what in Wan 2.1, as plans: for training and for sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

import maxattn as ma
from maxattn.masks import Mask, TeacherForcing

from .settings import Settings
from .sizes import Sizes


def tokens(sizes: Sizes, latents: tuple[int, ...]) -> int:
    """Count the patches of a video's latents, [C, F, h, w]."""
    sides = zip(latents[1:], sizes.patch_size, strict=True)
    return math.prod(side // patch for side, patch in sides)


def plans(
    settings: Settings,
    sizes: Sizes,
    batch: int,
    latents: tuple[int, ...],
    lengths: Mapping[str, int],
    mesh: jax.sharding.Mesh | None,
    mask: Mask | None = None,
) -> dict[str, ma.Plan]:
    """Plan self- and cross-attention, the image's too.

    Args:
        settings: of attention and of the model.
        sizes: of the model.
        batch: videos in one call of the model.
        latents: [C, F, h, w] of one.
        lengths: tokens of "text", and of "image" where there is one.
        mesh: that it runs on.
        mask: of training by forcing; that of teacher forcing is over two clips.
    """
    heads = (sizes.num_attention_heads, sizes.attention_head_dim)

    def states(length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, length, *heads), jnp.dtype(settings.model.dtype))

    video = states(tokens(sizes, latents) * (2 if isinstance(mask, TeacherForcing) else 1))
    calls = {"self": ma.Call.of(video, video, mask)}
    for role, name in (("cross", "text"), ("image", "image")):
        if name in lengths:
            calls[role] = ma.Call.of(video, states(lengths[name]), role="cross")
    return {role: ma.plan(call, settings, mesh) for role, call in calls.items()}
