"""Clips of digits, rendered on the device: two small matrix products a digit and frame."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn_examples.digits.words import SIDE

from .scenes import Scans, Scene, Size, corners
from .words import COLOURS, MOST

Clips = Float[Array, "B F H W 3"]


@partial(jax.jit, static_argnames="size")
def render(scene: Scene, ink: Float[Array, "n 8 8"], size: Size) -> Clips:
    """Draw clips, colours from 0 to 1.

    Args:
        scene: what happens in them.
        ink: of all scans, 0 to 1.
        size: of a clip.
    """
    at = corners(scene, size)
    rows = _weights(at[..., 0], size.height, size.digit)
    columns = _weights(at[..., 1], size.width, size.digit)
    exact = jax.lax.Precision.HIGHEST
    drawn = jnp.einsum("bkfhi,bkij,bkfwj->bkfhw", rows, ink[scene.scan], columns, precision=exact)
    cover = jnp.clip(1.3 * drawn, 0, 1) * scene.there[..., None, None, None]
    colours = jnp.asarray(np.array(list(COLOURS.values()), np.float32))[scene.colour]
    picture = jnp.zeros((*cover[:, 0].shape, 3))
    for k in reversed(range(MOST)):  # the first ones are in front
        over = cover[:, k, ..., None]
        picture = (1 - over) * picture + over * colours[:, k, None, None, None]
    return picture


def _weights(corner: Float[Array, "B K F"], pixels: int, digit: int) -> Float[Array, "B K F P 8"]:
    """Return how much each pixel of a digit's scan counts at each pixel of a side of the frame."""
    middle = (jnp.arange(pixels) + 0.5 - corner[..., None]) / (digit / SIDE) - 0.5
    return jnp.maximum(0, 1 - jnp.abs(middle[..., None] - jnp.arange(SIDE)))


def to_model(clips: Clips) -> Clips:
    """Return what the model learns, -1 to 1."""
    return 2 * clips - 1


def of_model(samples: Clips) -> Clips:
    """Return colours from 0 to 1 of what the model drew."""
    return jnp.clip((samples + 1) / 2, 0, 1)


def scans_here(scans: Scans) -> Float[Array, "n 8 8"]:
    """Put the ink of scans on the device."""
    return jnp.asarray(scans.ink)
