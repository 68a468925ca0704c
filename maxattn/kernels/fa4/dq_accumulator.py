"""FlashAttention-4's backward over many blocks of keys: the first and the last of its launches are
made once.

A block is one array, which arrived so, and its gradients leave as one: the kernel reads and writes
them in place.

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.0.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import Rows
from maxattn.kernels.fa4 import backward_steps
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.primitives import widened
from maxattn.kernels.fa4.ring_waves import divided
from maxattn.kernels.fa4.tile_sizes import backward_tile
from maxattn.kernels.kv_block import TWO_TILES, WHOLE, Cut, Packed, Shares, halves
from maxattn.kernels.softmax import BIG_LSE, NEG_INF

Dims = tuple[int, ...]


def fits(kernel: Fa4, queries: Dims, keys: Dims) -> bool:
    """Tell whether the three launches are those of arrays of these shapes, [B,T,N,H] and
    [B,S,K,H].
    """
    return (
        backward_steps.of_shape(queries, keys) and keys[1] >= TWO_TILES and not kernel.lse_gradient
    )


def shares(kernel: Fa4, keys: Dims, places: int) -> Shares:
    """Divide a ring's keys so that the launches fill the processors.

    Args:
        kernel: that computes; on other GPUs than Hopper's keys are halved.
        keys: the shape of a place's own.
        places: of the ring.
    """
    batch, length, heads, head_dim = keys
    # Room for guests stands between a block's batch rows, which the forward would have to copy out.
    made = divided(length, backward_tile(head_dim).keys, batch * heads, places, kernel.processors)
    known = kernel.launched and made.middle and (batch == 1 or not made.along)
    return made if known else halves(length)


class Fa4Sums:
    """Hold delta, the LSE in base 2, and dQ in float32.

    Args:
        scale: multiplies the scores.
        q, k: this device's queries, and keys of some block, whose shape alone counts.
        rows: of the queries.
    """

    def __init__(self, scale: float, q: Array, k: Array, rows: Rows) -> None:
        out, lse, dout, _ = rows.operands
        self._q, self._dout = widened(q), widened(dout.astype(q.dtype))
        self._launches = backward_steps.Launches(scale, q, k)
        # Rows that padding added have no LSE and no gradient.
        safe = jnp.where(lse == NEG_INF, BIG_LSE, lse)
        self.state: Any = self._launches.first(out.astype(q.dtype), self._dout, safe)

    def add(self, keys: Packed, cut: Cut = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a part of a block of keys to dQ, and write its (dk, dv) into `grads`, or into a new
        array.
        """
        delta, lse, dq = self.state
        dq, found = self._launches.block(self._q, keys, self._dout, lse, delta, dq, cut, grads)
        self.state = delta, lse, dq
        return found

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return self._launches.last(self.state[2], self._q)
