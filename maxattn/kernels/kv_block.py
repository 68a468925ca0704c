"""A block of keys as one array, as it travels round a ring, its parts, and how a ring divides the
work on blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TWO_TILES = 256  # keys

Packed = Float[Array, "R2 B S K H"]
"""K and V of a block of keys, or their gradients, as one array."""


class Cut(NamedTuple):
    """Name a part of a block of keys, as a slice does: a negative stop counts from the block's
    end.
    """

    start: int = 0
    stop: int | None = None

    def bounds(self, length: Any) -> tuple[int, Any]:
        """Return where it begins and ends in a block of so many keys: an int, or a number of a
        kernel.
        """
        if self.stop is None:
            return self.start, length
        return self.start, (length + self.stop if self.stop < 0 else self.stop)


WHOLE = Cut()


class Shares(NamedTuple):
    """Say how the backward of a ring divides keys over its launches.

    Args:
        middle: where a block that is computed in two parts is cut; 0: it is computed in one.
        along: keys of a place's own that are computed along with each other place's block, at that
            block's end.
    """

    middle: int
    along: int = 0

    def guests(self, hop: int, length: int) -> Cut:
        """Return which of a place's own keys go along with the block of a hop: the last ones, hop
        by hop.
        """
        return Cut(length - hop * self.along, length - (hop - 1) * self.along)

    def rest(self, places: int) -> Cut:
        """Return what is left of its own after the first part, in a block with room for guests at
        its end.
        """
        return Cut(self.middle, -places * self.along or None)


def halves(length: int) -> Shares:
    """Cut in the middle: at a multiple of 128, the later of two as near; short ones, of less than
    two tiles, anywhere.

    Args:
        length: of a place's keys.
    """
    return Shares(length // 2 if length < TWO_TILES else -(-length // TWO_TILES) * (TWO_TILES // 2))


def as_one(k: Array, v: Array, room: int = 0) -> Packed:
    """Make one array of two, with room for so many more keys at its end."""
    if room:
        k, v = (jnp.pad(x, ((0, 0), (0, room), (0, 0), (0, 0))) for x in (k, v))
    # Chosen element by element: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB
    # on an H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def taken(packed: Packed, cut: Cut) -> Packed:
    """Take a part out of a block."""
    start, end = cut.bounds(packed.shape[2])
    return jax.lax.slice_in_dim(packed, start, end, axis=2)


def put(part: Packed, packed: Packed, start: int) -> Packed:
    """Put a part into a block."""
    return jax.lax.dynamic_update_slice_in_dim(packed, part, start, axis=2)


def cut_out(packed: Packed, which: int, cut: Cut) -> Array:
    """Cut K (0) or V (1) of a part out, in one slice, which XLA need not copy for most kernels
    where the batch is 1.
    """
    _, b, length, k, h = packed.shape
    start, end = cut.bounds(length)
    return jax.lax.slice(packed, (which, 0, start, 0, 0), (which + 1, b, end, k, h))[0]
