"""One tile of the backward, with keys along the sublanes.

    P^T = exp2(k q^T - lse)      dS^T = P^T * (v dO^T - delta)
    dV^T += dO^T P               dK^T += q^T dS               dQ^T += k^T dS^T

The exact LSE is known, so no maximum is needed. The gradients are transposed too: a matrix unit
then keeps P or dS, and the head dim streams through the unit. Without the transposition, a head dim
of 128 would fill half of the columns of a 256 x 256 unit. In shapes, C is a number of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxattn.kernels.transposed.tile import product

NONE = -1  # no block is being written


class Gradients(NamedTuple):
    """The sums dK^T and dV^T of one key block, in VMEM."""

    # dk, dv: the sums, [H, block_kv] float32
    dk: Any
    dv: Any
    k: Any  # [H, block_kv], the keys transposed; float32 in interpret mode

    def clear(self, k: Float[Array, "C H"]) -> None:
        """Begin a key block: set the sums to 0 and transpose its keys."""
        self.dk[...] = jnp.zeros(self.dk.shape, jnp.float32)
        self.dv[...] = jnp.zeros(self.dv.shape, jnp.float32)
        self.k[...] = k.T.astype(self.k.dtype)


class Queries(NamedTuple):
    """A query block."""

    # q, dout: [H, block_q]; q is multiplied by the scale and by log2(e)
    q: Float[Array, "H q"]
    dout: Float[Array, "H q"]
    lse: Float[Array, "1 q"]  # [1, block_q], in base 2
    delta: Float[Array, "1 q"]  # [1, block_q]


def weights(
    k: Float[Array, "C H"], queries: Queries, allowed: Bool[Array, "C q"] | None
) -> Float[Array, "C q"]:
    """Compute P^T, which is 0 for hidden pairs."""
    p = jnp.exp2(product(k, queries.q, 1, 0) - queries.lse)
    return p if allowed is None else jnp.where(allowed, p, 0.0)


def add_keys(
    sums: Gradients, keys: slice, v: Float[Array, "C H"], p: Float[Array, "C q"], queries: Queries
) -> Float[Array, "H q"]:
    """Add the dK and dV of the slice `keys` to the sums, and return these keys' part of dQ^T."""
    dtype = v.dtype
    ds = (p * (product(v, queries.dout, 1, 0) - queries.delta)).astype(dtype)
    sums.dv[:, keys] += product(queries.dout, p.astype(dtype), 1, 1)
    sums.dk[:, keys] += product(queries.q, ds, 1, 1)
    return product(sums.k[:, keys], ds.astype(sums.k.dtype), 1, 0)


class HbmSum(NamedTuple):
    """The sum dQ^T in HBM, to which a kernel adds one query block per step.

    A block is fetched while its step computes, and written while the next step computes. At most
    one write is in flight.
    """

    whole: Any  # [heads, H, T] in HBM
    # old, new: [H, block] in VMEM: the block before and after the addition
    old: Any
    new: Any
    writing: Any  # [1] in scalar memory: the block that is being written, or NONE
    semaphores: Any  # [2], one for the fetch and one for the write

    def begin(self) -> None:
        self.writing[0] = NONE

    def fetch(self, head: Any, block: Any) -> None:
        """Start to read a block; if the block is still being written, wait for the write first."""
        self._wait_if(self.writing[0] == self._place(head, block))
        self._fetch(head, block).start()

    def add(self, head: Any, block: Any, x: Float[Array, "H q"]) -> None:
        """Add `x` to the fetched block, and start to write the sum."""
        self._fetch(head, block).wait()
        self._wait_if(self.writing[0] != NONE)
        self.new[...] = self.old[...] + x
        self._write(head, block).start()
        self.writing[0] = self._place(head, block)

    def end(self) -> None:
        self._wait_if(self.writing[0] != NONE)

    def _wait_if(self, condition: Any) -> None:
        from jax.experimental import pallas as pl

        @pl.when(condition)
        def _() -> None:
            self._write(0, 0).wait()  # a wait needs only the size, and all blocks have one size
            self.writing[0] = NONE

    def _place(self, head: Any, block: Any) -> Any:
        return jnp.int32(head * (self.whole.shape[2] // self.new.shape[1]) + block)

    def _fetch(self, head: Any, block: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.make_async_copy(self._at(head, block), self.old, self.semaphores.at[0])

    def _write(self, head: Any, block: Any) -> Any:
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.make_async_copy(self.new, self._at(head, block), self.semaphores.at[1])

    def _at(self, head: Any, block: Any) -> Any:
        from jax.experimental import pallas as pl

        size = self.new.shape[1]
        first = block * size if isinstance(block, int) else pl.multiple_of(block * size, size)
        return self.whole.at[head, :, pl.ds(first, size)]
