"""A block of keys as one array, ranges of it, and how a backward divides keys over its launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

TWO_TILES = 256  # keys

Packed = Float[Array, "R2 B S K H"]
"""K and V of a block of keys, or their gradients, as one array; zeros fill the narrower."""


class KeyRange(NamedTuple):
    """Name a range of the keys of a block, as a slice does.

    Args:
        start: the first key.
        stop: the key after the last; None for the end of the block, negative counts from there.
    """

    start: int = 0
    stop: int | None = None

    def bounds(self, length: Any) -> tuple[int, Any]:
        """Return the first key and the one after the last, in a block of `length` keys.

        Args:
            length: an int, or a number that a kernel computes with.
        """
        if self.stop is None:
            return self.start, length
        return self.start, (length + self.stop if self.stop < 0 else self.stop)


WHOLE = KeyRange()


class KeySplit(NamedTuple):
    """Say how a backward over several blocks of keys divides them over its launches.

    Args:
        middle: the key at which a block that takes two launches is cut; 0: no block takes two.
        spare_keys: room at the end of a block for keys of the local one, which are computed in the
            same launch so that its last wave is full.
    """

    middle: int
    spare_keys: int = 0


def halves(length: int) -> KeySplit:
    """Cut a block in the middle, at a multiple of 128 where it has two tiles.

    Args:
        length: keys of a block.
    """
    if length < TWO_TILES:
        return KeySplit(length // 2)
    return KeySplit(-(-length // TWO_TILES) * (TWO_TILES // 2))


def pack(k: Array, v: Array, spare_keys: int = 0) -> Packed:
    """Make one array of K and V, with room for spare keys at its end."""
    widest = max(k.shape[3], v.shape[3])
    k, v = widened(k, widest), widened(v, widest)
    if spare_keys:
        k, v = (jnp.pad(x, ((0, 0), (0, spare_keys), (0, 0), (0, 0))) for x in (k, v))
    # Chosen element by element: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB
    # on an H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def widened(x: Array, head_dim: int) -> Array:
    """Fill the heads of K or V with zeros, up to so many channels."""
    more = head_dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) if more else x


def slice_keys(packed: Packed, key_range: KeyRange) -> Packed:
    """Return a range of the keys of a block, K and V."""
    start, end = key_range.bounds(packed.shape[2])
    return jax.lax.slice_in_dim(packed, start, end, axis=2)


def write_keys(part: Packed, packed: Packed, start: int) -> Packed:
    """Return a block with some of its keys, from `start` on, replaced."""
    return jax.lax.dynamic_update_slice_in_dim(packed, part, start, axis=2)


def slice_one(packed: Packed, which: int, key_range: KeyRange, head_dim: int = 0) -> Array:
    """Return a range of K (0) or of V (1), of so many channels; 0 for all.

    One slice does both: for most kernels XLA need not copy it where the batch is 1.
    """
    _, b, length, k, h = packed.shape
    start, end = key_range.bounds(length)
    stop = (which + 1, b, end, k, head_dim or h)
    return jax.lax.slice(packed, (which, 0, start, 0, 0), stop)[0]
