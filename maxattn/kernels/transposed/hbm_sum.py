"""A sum in HBM to which a kernel adds a block at a step: dQ, of which no part is kept apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

NONE = -1


class HbmSum(NamedTuple):
    """Hold the sum and what moves its blocks, in a kernel.

    A block is fetched while a step computes what it adds, and written while the next step
    computes. One write is under way at most.

    Args:
        whole: [heads, H, T] in HBM.
        old, new: [H, block] in VMEM: the block that was fetched, and the one that is written.
        writing: [1] in scalar memory: which block is being written, or NONE.
        semaphores: [2], of the fetch and of the write.
    """

    whole: Any
    old: Any
    new: Any
    writing: Any
    semaphores: Any

    def begin(self) -> None:
        """Say that nothing is written yet."""
        self.writing[0] = NONE

    def fetch(self, head: Any, block: Any) -> None:
        """Start to read a block, after it was written."""
        self._wait_if(self.writing[0] == self._place(head, block))
        self._fetch(head, block).start()

    def add(self, head: Any, block: Any, x: Float[Array, "H q"]) -> None:
        """Add to the block that was fetched, and start to write it."""
        self._fetch(head, block).wait()
        self._wait_if(self.writing[0] != NONE)
        self.new[...] = self.old[...] + x
        self._write(head, block).start()
        self.writing[0] = self._place(head, block)

    def end(self) -> None:
        """Wait for the last write."""
        self._wait_if(self.writing[0] != NONE)

    def _wait_if(self, condition: Any) -> None:
        from jax.experimental import pallas as pl

        @pl.when(condition)
        def _() -> None:
            self._write(0, 0).wait()  # of any block: all have one size
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
