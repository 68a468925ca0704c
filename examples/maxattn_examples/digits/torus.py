"""Digits that move for ever: the opposite edges of the canvas are joined.

Each frame is the one before it, rolled, so that where a digit is at any frame is known.
Places are counted around: the centre of ink is the angle of its first Fourier coefficient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from .words import SIDE, STEPS

if TYPE_CHECKING:
    from .settings import DataSettings

Frames = Float[np.ndarray, "... H W"]


def rolled(
    scan: UInt8[np.ndarray, "8 8"], direction: str, lane: int, start: int, data: DataSettings
) -> UInt8[np.ndarray, "F H W"]:
    """Place a scan, and roll the canvas further each frame.

    Args:
        scan: the digit.
        direction: left, right, up or down.
        lane: pixels between the upper or left edge and the digit, across the movement.
        start: the same along the movement, in frame 0; there the digit may lie across an edge.
        data: how many frames of which size, and the pixels a frame.
    """
    first = np.zeros((data.canvas, data.canvas), np.uint8)
    first[:SIDE, :SIDE] = scan
    rows, columns = STEPS[direction]
    row, column = (start, lane) if rows else (lane, start)
    far = (frame * data.speed for frame in range(data.frames))
    moved = ((row + by * rows, column + by * columns) for by in far)
    return np.stack([np.roll(first, by, (0, 1)) for by in moved])


def centre(frames: Frames) -> Float[np.ndarray, "... 2"]:
    """Return row and column of the centre of ink, each from -H/2 to H/2, counted around."""
    size = frames.shape[-1]
    waves = np.exp(2j * np.pi * np.arange(size) / size)
    both = (frames.sum(-1) * waves).sum(-1), (frames.sum(-2) * waves).sum(-1)
    return np.angle(np.stack(both, axis=-1)) * size / (2 * np.pi)


def apart(pixels: Float[np.ndarray, "..."], size: int) -> Float[np.ndarray, "..."]:
    """Return distances the short way around, from -size/2 to size/2."""
    return (pixels + size / 2) % size - size / 2


def unrolled(frames: Frames) -> Frames:
    """Roll every frame so that its centre of ink lies in the middle of the canvas."""
    size = frames.shape[-1]
    flat = frames.reshape(-1, size, size)
    shifts = np.round((size - 1) / 2 - centre(flat)).astype(int)
    moved = [np.roll(frame, by, (0, 1)) for frame, by in zip(flat, shifts, strict=True)]
    return np.stack(moved).reshape(frames.shape)
