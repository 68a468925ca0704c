"""The backward over several blocks of keys, every pair allowed: dQ is summed block by block.

A kernel may keep dQ in one float32 array between blocks, which saves each block's passes over the
queries. For any other kernel the dQ of each block is kept as the kernel wrote it, and all of them
are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.kv_block import WHOLE, KeyRange, Packed, pack, slice_one, write_keys

if TYPE_CHECKING:
    from maxattn.kernels.base import Grads, Inputs, Rows

MOST_PARTS = 4  # that are kept before they become one in float32


class DqAccumulator:
    """Hold the sum of dQ over the blocks so far.

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
