"""The backward over several blocks of keys, every pair allowed: dQ is summed block by block.

A block is one array of K and V. A kernel may keep dQ in one float32 array between blocks, which
saves each block's passes over the queries. For any other kernel the dQ of each block is kept as the
kernel wrote it, and all of them are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from maxattn.kernels.base import Grads, Inputs, Rows

TWO_TILES = 256  # keys
MOST_PARTS = 4  # that are kept before they become one in float32

Packed = Float[Array, "R2 B S K H"]
"""K and V of a block of keys, or their gradients, as one array; zeros fill the narrower."""


class KeyRange(NamedTuple):
    """Name a range of the keys of a block, as a slice does.

    Args:
        start: the first key.
        stop: the key after the last; None for the end of the block.
    """

    start: int = 0
    stop: int | None = None

    def bounds(self, length: Any) -> tuple[int, Any]:
        """Return the first key and the one after the last, in a block of `length` keys.

        Args:
            length: an int, or a number that a kernel computes with.
        """
        return self.start, length if self.stop is None else self.stop


WHOLE = KeyRange()


def middle_key(length: int) -> int:
    """Return the key at which a block of `length` keys is halved, on a tile where it has two.

    0: a block of one key stays whole.
    """
    if length < TWO_TILES:
        return length // 2
    return -(-length // TWO_TILES) * (TWO_TILES // 2)


def pack(k: Array, v: Array) -> Packed:
    """Make one array of K and V."""
    widest = max(k.shape[3], v.shape[3])
    k, v = widened(k, widest), widened(v, widest)
    # Chosen element by element: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB
    # on an H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def widened(x: Array, head_dim: int) -> Array:
    """Fill the heads of K or V with zeros, up to so many channels."""
    more = head_dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) if more else x


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


class DqAccumulator:
    """The sum of dQ over the blocks so far.

    Attributes:
        state: a tree of arrays, which a caller may replace by equal ones.
    """

    state: Any

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add what a range of a block's keys gives to dQ, and return (dk, dv) of the block.

        Args:
            keys: the block, [2,B,S,K,H].
            key_range: the range.
            grads: what earlier ranges of the block gave. Without it, the gradients of keys outside
                of the range are not set.
        """
        raise NotImplementedError

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        raise NotImplementedError


class SumOfParts(DqAccumulator):
    """Sum the dQ that a kernel's own backward gives for each block.

    Args:
        backward: the kernel's.
        inputs: the local queries; its keys are replaced by those of each block.
        rows: of the queries.
    """

    def __init__(
        self, backward: Callable[[Inputs, Rows], Grads], inputs: Inputs, rows: Rows
    ) -> None:
        self._backward, self._inputs, self._rows = backward, inputs, rows
        self.state: Any = []

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a range of a block's keys, and return (dk, dv) of the block."""
        dims = self._inputs.k.shape[3], self._inputs.v.shape[3]
        k, v = (slice_one(keys, which, key_range, dim) for which, dim in enumerate(dims))
        dq, dk, dv, _ = self._backward(self._inputs.replace(k=k, v=v), self._rows)
        self.state = added(self.state, dq)
        found = pack(dk.astype(k.dtype), dv.astype(k.dtype))
        start, end = key_range.bounds(keys.shape[2])
        if grads is None:
            return jnp.pad(found, ((0, 0), (0, 0), (start, keys.shape[2] - end), (0, 0), (0, 0)))
        return write_keys(found, grads, start)

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        q = self._inputs.q
        return total(self.state, q).astype(q.dtype)


def added(parts: list[Array], part: Array) -> list[Array]:
    """Return a list with one part more; many parts become one in float32."""
    return [total(parts, part), part] if len(parts) >= MOST_PARTS else [*parts, part]


def total(parts: list[Array], like: Array) -> Array:
    """Return the sum of parts in float32, computed in one pass; zeros like `like` for none."""
    if not parts:
        return jnp.zeros(like.shape, jnp.float32)
    first, *rest = (x.astype(jnp.float32) for x in parts)
    return sum(rest, first)
