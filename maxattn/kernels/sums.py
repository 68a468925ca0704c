"""The backward over many blocks of keys, every pair allowed: dQ is begun once, added to block by block, and read once.

A kernel that keeps dQ in float32 between blocks saves each block's passes over the queries. For any other kernel the
parts are kept as it wrote them, and summed in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.base import Kernel
from maxattn.kernels.fa4 import Fa4
from maxattn.kernels.pair import Pair
from maxattn.masks import Full

MOST_PARTS = 4  # that are kept before they become one in float32

Packed = Float[Array, "R2 B S K H"]
"""K and V of a block of keys, or their gradients, as one array."""


class Cut(NamedTuple):
    """Name a part of a block of keys: all of it, or one of two halves."""

    part: int
    of: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return where it begins and ends; halves meet at a multiple of 128 in a block of 256 and more."""
        middle = length // 2 if length < 256 else -(-length // 256) * 128
        return (0, middle, length)[self.part], (length if self.of == 1 else (middle, length)[self.part])


WHOLE, FIRST, SECOND = Cut(0, 1), Cut(0, 2), Cut(1, 2)


class Sums(Protocol):
    """Hold the sum so far; `state` is a tree of arrays, which a caller may replace by equal ones."""

    state: Any

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and return the (dk, dv) of that part, and of what `grads` has of it.

        Args:
            keys: the block, [2,B,S,K,H].
            cut: the part.
            grads: what the first half gave, where this is the second one.
        """
        ...

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        ...


class Parts:
    """Sum what a kernel's own backward gives.

    Args:
        kernel: any.
        q: this device's queries.
        rows: the (out, lse, dout, dlse) of all keys.
    """

    def __init__(self, kernel: Kernel, q: Array, rows: tuple[Array, Array, Array, Array]) -> None:
        self._kernel, self._q, self._rows = kernel, q, rows
        self.state: Any = []

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and return its (dk, dv), after those of the first half."""
        k, v = (_cut(keys, which, *cut.bounds(keys.shape[2])) for which in (0, 1))
        dq, dk, dv, _ = self._kernel.backward(self._q, k, v, None, Full(), 0, 0, *self._rows)
        self.state = added(self.state, dq)
        found = as_one(dk.astype(k.dtype), dv.astype(k.dtype))
        return found if grads is None else jnp.concatenate([grads, found], 2)

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return total(self.state, self._q).astype(self._q.dtype)


def sums_of(kernel: Kernel, q: Array, k: Array, rows: tuple[Array, Array, Array, Array]) -> Sums:
    """Begin the backward over many blocks of keys.

    Args:
        kernel: whose backward it is.
        q, k: this device's queries, and keys of some block.
        rows: the (out, lse, dout, dlse) of all keys.
    """
    kernel = kernel.second if isinstance(kernel, Pair) else kernel
    if isinstance(kernel, Fa4):
        from maxattn.kernels import fa4_sums  # asks fa4-jax

        if fa4_sums.fits(kernel, q, k):
            return fa4_sums.Fa4Sums(kernel.scale, q, k, rows)
    return Parts(kernel, q, rows)


def added(parts: list[Array], part: Array) -> list[Array]:
    """Keep one part more; many become one in float32."""
    return [total(parts, part), part] if len(parts) >= MOST_PARTS else [*parts, part]


def total(parts: list[Array], like: Array) -> Array:
    """Sum parts in float32, in one pass."""
    if not parts:
        return jnp.zeros(like.shape, jnp.float32)
    first, *rest = (x.astype(jnp.float32) for x in parts)
    return sum(rest, first)


def as_one(k: Array, v: Array) -> Packed:
    """Make one array of two."""
    # Chosen element by element: XLA writes a stack at half of a GPU's bandwidth (0.20 ms for 168 MB on an H200).
    return jnp.where(jnp.arange(2).reshape(2, 1, 1, 1, 1) == 0, k, v)


def _cut(packed: Packed, which: int, start: int, end: int) -> Array:
    """Cut keys out in one slice, which XLA hands to most kernels without a copy where the batch is 1."""
    _, b, _, k, h = packed.shape
    return jax.lax.slice(packed, (which, 0, start, 0, 0), (which + 1, b, end, k, h))[0]
