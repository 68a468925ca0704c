"""The backward over several blocks of keys without a mask: dQ is summed block by block.

A block is one array that packs K and V. A kernel may keep dQ in one float32 array between blocks,
which saves passes over the queries. Otherwise each block's dQ is kept in the kernel's dtype, and
these parts are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.softmax import gradient_dtype

if TYPE_CHECKING:
    from maxattn.kernels.base import Grads, Inputs, Rows

TWO_TILES = 256  # keys in two key tiles
MOST_PARTS = 4  # most arrays of dQ that are kept before they are summed in float32

Packed = Float[Array, "R2 B S K H"]
"""K and V (or dK and dV) of a block of keys as one array; the smaller head dim is padded."""


class KeyRange(NamedTuple):
    """Keys [start, stop) of a block; a stop of None is the end of the block."""

    start: int = 0
    stop: int | None = None

    def bounds(self, length: Any) -> tuple[int, Any]:
        """Return (start, stop) in a block of `length` keys; `length` may be traced."""
        return self.start, length if self.stop is None else self.stop


WHOLE = KeyRange()


def middle_key(length: int) -> int:
    """Return the index of the key that halves a block, on a tile boundary from two tiles on."""
    if length < TWO_TILES:
        return length // 2
    return -(-length // TWO_TILES) * (TWO_TILES // 2)


def pack(k: Array, v: Array) -> Packed:
    widest = max(k.shape[3], v.shape[3])
    k, v = widened(k, widest), widened(v, widest)
    # Elementwise: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB, H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def widened(x: Array, head_dim: int) -> Array:
    """Pad the last axis, the head dim, with zeros to `head_dim`."""
    more = head_dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) if more else x


def slice_one(packed: Packed, which: int, key_range: KeyRange, head_dim: int = 0) -> Array:
    """Return a key range of K (`which` 0) or V (1), with `head_dim` channels; 0 for all channels.

    The result is a single slice, which XLA need not copy for most kernels if the batch is 1.
    """
    _, b, length, k, h = packed.shape
    start, end = key_range.bounds(length)
    stop = (which + 1, b, end, k, head_dim or h)
    return jax.lax.slice(packed, (which, 0, start, 0, 0), stop)[0]


class DqAccumulator:
    """The sum of dQ over the blocks of keys that were added so far."""

    state: Any
    """The arrays of the sum; a caller may carry them through a loop and set them again."""

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add the dQ of a range of a block's keys, and return the block's (dk, dv) as one array.

        `grads` is the result for earlier ranges of the same block; if None, the gradients of keys
        outside the range are undefined.
        """
        raise NotImplementedError

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in `gradient_dtype(q)`."""
        raise NotImplementedError


class SumOfParts(DqAccumulator):
    """Call a kernel's `backward` for each block of keys, and sum the dQ that it returns."""

    def __init__(
        self, backward: Callable[[Inputs, Rows], Grads], inputs: Inputs, rows: Rows
    ) -> None:
        self._backward, self._inputs, self._rows = backward, inputs, rows
        self.state: Any = []

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        dims = self._inputs.k.shape[3], self._inputs.v.shape[3]
        k, v = (slice_one(keys, which, key_range, dim) for which, dim in enumerate(dims))
        dq, dk, dv, _ = self._backward(self._inputs.replace(k=k, v=v), self._rows)
        self.state = added(self.state, dq)
        found = pack(*(x.astype(gradient_dtype(k)) for x in (dk, dv)))
        start, end = key_range.bounds(keys.shape[2])
        if grads is None:
            return jnp.pad(found, ((0, 0), (0, 0), (start, keys.shape[2] - end), (0, 0), (0, 0)))
        return jax.lax.dynamic_update_slice_in_dim(grads, found, start, axis=2)

    def dq(self) -> Array:
        q = self._inputs.q
        return total(self.state, q).astype(gradient_dtype(q))


def added(parts: list[Array], part: Array) -> list[Array]:
    """Return the list with `part` appended; `MOST_PARTS` arrays are summed to one in float32."""
    return [total(parts, part), part] if len(parts) >= MOST_PARTS else [*parts, part]


def total(parts: list[Array], like: Array) -> Array:
    """Return the float32 sum of arrays; zeros with the shape of `like` if there are none."""
    if not parts:
        return jnp.zeros(like.shape, jnp.float32)
    first, *rest = (x.astype(jnp.float32) for x in parts)
    return sum(rest, first)
