"""Work that keeps a GPU busy while the host queues the short calls that are timed behind it.

The host takes 5 to 50 microseconds to launch a kernel. Kernels that are shorter would wait for it,
and a timing would tell the host's time; in a model they follow longer ones, and do not wait. So
passes over memory come first in a timed program. A program of them alone is timed in the same
rounds, and its time is taken off. They need little power, so that clocks stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

from maxattn.tools.bench.timing import several

PASSES = 12  # 0.12 ms each on an H200
LEAST = 1e-6  # seconds: where the time of the passes hides that of a call
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


def several_behind(f: Callable[..., Any]) -> Callable[..., tuple[list[Any], Memory]]:
    """Return a function of memory and several inputs: `f` of one after the other, behind passes."""

    def work(x: Memory, sets: list[Any]) -> tuple[list[Any], Memory]:
        sets, left = behind(x, sets)
        return several(f, sets), left

    return work


def calls_of(micros: float) -> int:
    """Return how many calls one program makes: more of short ones, so that the host's share does
    not show.

    Args:
        micros: that a call takes, about.
    """
    if jax.default_backend() == "cpu":
        return 1
    steps = (1000, 1), (300, 2), (100, 3), (15, 4), (0, 6)
    return next(calls for least, calls in steps if micros >= least)


def each_of(seconds: float, alone: float, calls: int) -> float:
    """Return the seconds of one of several calls, without those of the passes before them."""
    return max(seconds - alone, LEAST) / calls


def compiler_options() -> dict[str, Any]:
    """Have XLA choose by time as ever, without a check of what each candidate gives: minutes."""
    return {"xla_gpu_autotune_level": 2} if jax.default_backend() == "gpu" else {}
