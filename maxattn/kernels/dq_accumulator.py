"""The backward over many blocks of keys, every pair allowed: dQ is begun once, added to block by
block, and read once.

A kernel that keeps dQ in float32 between blocks saves each block's passes over the queries. For any
other kernel the parts are kept as it wrote them, and summed in float32.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import Inputs, Kernel, Rows
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.kv_block import WHOLE, Cut, Packed, Shares, as_one, cut_out, halves, put
from maxattn.kernels.pair import Pair

MOST_PARTS = 4  # that are kept before they become one in float32


class Sums(Protocol):
    """Hold the sum so far; `state` is a tree of arrays, which a caller may replace by equal
    ones.
    """

    state: Any

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and return its (dk, dv), in an array of the block's
        shape.

        Args:
            keys: the block, [2,B,S,K,H].
            cut: the part.
            grads: what an earlier part of the block gave; without it, gradients of other parts are
                not set.
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
        rows: of the queries.
    """

    def __init__(self, kernel: Kernel, q: Array, rows: Rows) -> None:
        self._kernel, self._q, self._rows = kernel, q, rows
        self.state: Any = []

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and return its (dk, dv), among those of `grads`."""
        k, v = (cut_out(keys, which, cut) for which in (0, 1))
        dq, dk, dv, _ = self._kernel.backward(Inputs(self._q, k, v), self._rows)
        self.state = added(self.state, dq)
        found = as_one(dk.astype(k.dtype), dv.astype(k.dtype))
        start, end = cut.bounds(keys.shape[2])
        if grads is None:
            return jnp.pad(found, ((0, 0), (0, 0), (start, keys.shape[2] - end), (0, 0), (0, 0)))
        return put(found, grads, start)

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return total(self.state, self._q).astype(self._q.dtype)


def sums_of(kernel: Kernel, q: Array, k: Array, rows: Rows) -> Sums:
    """Begin the backward over many blocks of keys.

    Args:
        kernel: whose backward it is.
        q, k: this device's queries and keys; of the keys the shape alone counts.
        rows: of the queries.
    """
    from maxattn.kernels.fa4 import backward_steps, dq_accumulator

    fa4 = in_place(kernel, q.shape, k.shape)
    if fa4 is None or not backward_steps.made_apart():
        return Parts(_backward_of(kernel), q, rows)
    return dq_accumulator.Fa4Sums(fa4.scale, q, k, rows)


def shares_of(
    kernel: Kernel, queries: tuple[int, ...], keys: tuple[int, ...], places: int
) -> Shares:
    """Say how the backward of a ring divides keys over its launches.

    Args:
        kernel: whose backward it is.
        queries, keys: the shapes [B,T,N,H] and [B,S,K,H] of a device's.
        places: of the ring.
    """
    from maxattn.kernels.fa4 import dq_accumulator

    fa4 = in_place(kernel, queries, keys)
    return halves(keys[1]) if fa4 is None else dq_accumulator.shares(fa4, keys, places)


def in_place(kernel: Kernel, queries: tuple[int, ...], keys: tuple[int, ...]) -> Fa4 | None:
    """Return the kernel that keeps dQ in float32 between blocks, where that is what computes."""
    from maxattn.kernels.fa4 import dq_accumulator

    kernel = _backward_of(kernel)
    return (
        kernel if isinstance(kernel, Fa4) and dq_accumulator.fits(kernel, queries, keys) else None
    )


def _backward_of(kernel: Kernel) -> Kernel:
    return kernel.second if isinstance(kernel, Pair) else kernel


def added(parts: list[Array], part: Array) -> list[Array]:
    """Keep one part more; many become one in float32."""
    return [total(parts, part), part] if len(parts) >= MOST_PARTS else [*parts, part]


def total(parts: list[Array], like: Array) -> Array:
    """Sum parts in float32, in one pass."""
    if not parts:
        return jnp.zeros(like.shape, jnp.float32)
    first, *rest = (x.astype(jnp.float32) for x in parts)
    return sum(rest, first)
