"""Pixels of the handwritten digits: ink from 0 to 16, -1..1 for a model, or channels of latents.

An "encoder" of latents cuts a frame into squares and takes the pixels of each square for channels.
"""

from __future__ import annotations

import numpy as np
from einops import rearrange
from jaxtyping import Float, UInt8

INK = 16.0  # the darkest value of a scan


def to_model(frames: UInt8[np.ndarray, "..."]) -> Float[np.ndarray, "... 1"]:
    """Scale ink to -1..1 and add the channel axis."""
    return (frames.astype(np.float32) / (INK / 2) - 1.0)[..., None]


def from_model(video: Float[np.ndarray, "... 1"]) -> Float[np.ndarray, "..."]:
    """Undo `to_model`, clipped to the ink that a scan can have."""
    return np.clip((np.asarray(video)[..., 0] + 1.0) * (INK / 2), 0.0, INK)


def to_latents(frames: Float[np.ndarray, "F H W"], side: int) -> Float[np.ndarray, "C F h w"]:
    """Take the pixels of each square for channels; a square has `side` pixels along a side."""
    return rearrange(frames, "F (h y) (w x) -> (y x) F h w", y=side, x=side)


def from_latents(latents: Float[np.ndarray, "C F h w"]) -> Float[np.ndarray, "F H W"]:
    """Undo `to_latents`, to ink from 0 to 16."""
    side = round(len(latents) ** 0.5)
    return from_model(rearrange(latents, "(y x) F h w -> F (h y) (w x) 1", y=side, x=side))
