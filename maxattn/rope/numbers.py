"""Angles of positions that are known on the device alone, as exact as those of the host.

A float32 has 24 bits: the angle of frame 100,000 would be off by 0.008. So a position is cut into
digits, the angles of each digit come from a table that was computed in float64, and cosines and
sines of a sum are made of those of its parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

BITS, DIGITS = 8, 4  # four digits of 8 bits are every int32 from 0 on


def cos_sin(
    positions: Int[Array, "..."], frequencies: Float[np.ndarray, " P"]
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """Return cosine and sine of positions * frequencies, in float32.

    Args:
        positions: whole numbers from 0 on; may be traced.
        frequencies: float64.
    """
    positions = positions.astype(jnp.int32)
    cos, sin = _part(positions, 0, frequencies)
    for digit in range(1, DIGITS):
        c, s = _part(positions, digit, frequencies)
        # A digit of 0 has c = 1 and s = 0, which changes no bit.
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def _part(positions: Array, digit: int, frequencies: np.ndarray) -> Any:
    """Look up cosine and sine of one digit's share of the angle."""
    values = np.arange(1 << BITS, dtype=np.float64) * float(1 << BITS * digit)
    angles = values[:, None] * frequencies
    at = jax.lax.shift_right_logical(positions, np.int32(BITS * digit)) & ((1 << BITS) - 1)
    return tuple(jnp.asarray(f(angles).astype(np.float32))[at] for f in (np.cos, np.sin))
