"""A block of keys as one array, as it travels round a ring, and its parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TWO_TILES = 256  # keys

Packed = Float[Array, "R2 B S K H"]
"""K and V of a block of keys, or their gradients, as one array."""


class Cut(NamedTuple):
    """Name a part of a block of keys: all of it, or one of two halves."""

    part: int
    of: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return where it begins and ends."""
        return self.between(length // 2 if length < TWO_TILES else halfway(length), length)

    def between(self, middle: Any, length: Any) -> tuple[Any, Any]:
        """Return where it begins and ends, with halves that meet in a middle: ints, or numbers of a kernel."""
        return (0, middle)[self.part], (length if self.of == 1 else (middle, length)[self.part])


def halfway(length: Any) -> Any:
    """Return the middle of a block of at least two tiles: a multiple of 128, the later of two as near."""
    return (length + TWO_TILES - 1) // TWO_TILES * (TWO_TILES // 2)


WHOLE, FIRST, SECOND = Cut(0, 1), Cut(0, 2), Cut(1, 2)


def as_one(k: Array, v: Array) -> Packed:
    """Make one array of two."""
    # Chosen element by element: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB on an H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def cut_out(packed: Packed, which: int, cut: Cut) -> Array:
    """Cut K (0) or V (1) of a part out, in one slice, which XLA need not copy for most kernels where the batch is 1."""
    _, b, length, k, h = packed.shape
    start, end = cut.bounds(length)
    return jax.lax.slice(packed, (which, 0, start, 0, 0), (which + 1, b, end, k, h))[0]
