"""Positions of tokens, and rotary tables for tokens without a position."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

Positions = Float[np.ndarray, "T axes"]


def grid(*axes: int | Float[np.ndarray, " n"]) -> Positions:
    """List the points of a grid in raster order; a number n gives 0 to n - 1."""
    lines = [np.arange(a) if isinstance(a, int) else a for a in axes]
    return np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, len(axes)).astype(float)


def still(tokens: int, axes: int = 3) -> Positions:
    """Return position 0, at which nothing is rotated."""
    return np.zeros((tokens, axes))


def of_channels(
    positions: Float[np.ndarray, "B T axes"], width: int, theta: float = 1e4
) -> Float[np.ndarray, "B T half"]:
    """Return LTX's angles for all channels of a token, with frequencies from pi/2 to theta pi/2.

    The axes alternate; if they do not divide the channels, zeros come first. Angles are products in
    float32, as in LTX: the largest are thousands of turns.
    """
    axes = positions.shape[-1]
    frequencies = (theta ** np.linspace(0, 1, width // (2 * axes)) * np.pi / 2).astype(np.float32)
    angles = (positions.astype(np.float32)[..., None, :] * 2 - 1) * frequencies[:, None]
    angles = angles.reshape(*positions.shape[:-1], -1)
    pad = np.zeros((*angles.shape[:-1], width // 2 - angles.shape[-1]), np.float32)
    return np.concatenate((pad, angles), -1)
