"""Work that keeps a GPU busy while the host queues the short calls that are timed behind it.

The host takes 5 to 50 microseconds to launch a kernel. Kernels that are shorter would wait for it,
and a timing would tell the host's time; in a model they follow longer ones, and do not wait. So
passes over memory come first in a timed program. A program of them alone is timed in the same
rounds, and its time is taken off. They need little power, so that clocks stay as they are.
"""

from __future__ import annotations

from typing import TypeVar

import jax.numpy as jnp
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

PASSES = 12  # 0.12 ms each on an H200
ENTRIES = 1 << 26  # float32: 256 MiB, more than any cache holds

T = TypeVar("T")
Memory = Float[Array, " entries"]


def memory() -> Memory:
    """Return what the passes go over."""
    return jnp.zeros(ENTRIES, jnp.float32)


def pass_over(x: Memory) -> Memory:
    """Read and write memory, pass after pass."""
    for _ in range(PASSES):
        x = optimization_barrier(x + 1)
    return x[:1]


def behind(x: Memory, inputs: T) -> tuple[T, Memory]:
    """Return inputs that are there after the passes over memory, and what these leave.

    A program returns both: XLA drops passes of which nothing is used.
    """
    return optimization_barrier((inputs, pass_over(x)))
