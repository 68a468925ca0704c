"""FlashAttention-4's backward over several blocks of keys: dQ stays in one float32 array.

The first and the last of its launches are made once for all blocks. A block is one array, as it
arrived, and its gradients leave as one: the kernel reads and writes them in place.

Source: Dao-AILab, flash-attention (CuTe kernels); the launches of fa4-jax 0.1.0.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import TWO_TILES, WHOLE, DqAccumulator, Inputs, KeyRange, Packed, Rows
from maxattn.kernels.fa4 import backward_steps
from maxattn.kernels.fa4.kernel_calls import BlockOperands
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.softmax import BIG_LSE, NEG_INF


def may_fit(call: Call) -> bool:
    """Tell whether the launches may be those of a call, whatever its lengths."""
    return call.heads == call.kv_heads and call.head_dim <= backward_steps.HEAD_LIMIT


def fits(inputs: Inputs) -> bool:
    """Tell whether the launches are those of arrays of these shapes."""
    queries, keys = inputs.q.shape, inputs.k.shape
    return backward_steps.of_shape(queries, keys) and keys[1] >= TWO_TILES


class Fa4DqAccumulator(DqAccumulator):
    """Hold delta, the LSE in base 2, and dQ in float32.

    Args:
        scale: multiplies the scores.
        inputs: the local queries, and keys of some block, whose shape alone counts.
        rows: of the queries.
    """

    def __init__(self, scale: float, inputs: Inputs, rows: Rows) -> None:
        q = inputs.q
        self._q, self._dout = own_array(q), own_array(rows.dout.astype(q.dtype))
        self._launches = backward_steps.Launches(scale, q, inputs.k)
        # Rows that padding added have no LSE and no gradient.
        safe = jnp.where(rows.lse == NEG_INF, BIG_LSE, rows.lse)
        self.state: Any = self._launches.first(rows.out.astype(q.dtype), self._dout, safe)

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        """Add a range of a block's keys to dQ, and write its (dk, dv) into `grads` or a new array.

        The arguments are those of `DqAccumulator.add`.
        """
        delta, lse, dq = self.state
        before = () if grads is None else (grads,)
        given = BlockOperands(self._q, keys, self._dout, lse, delta, dq, before)
        dq, found = self._launches.block(given, key_range)
        self.state = delta, lse, dq
        return found

    def dq(self) -> Array:
        """Return dQ over all blocks so far, in q's dtype."""
        return self._launches.last(self.state[2], self._q)
