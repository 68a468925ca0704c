"""Work that keeps a GPU busy while the host queues the short calls that are timed behind it.

The host takes 5 to 50 microseconds to launch a kernel. Kernels that are shorter would wait for it,
and a timing would tell the host's time; in a model they follow longer ones, and do not wait. So a
program of passes over memory is queued before each that is timed, and the device's own clock tells
what comes after it (behind.py). Passes need little power, so that clocks stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

PASSES = 12  # 0.06 ms each on an H200
ENTRIES = 1 << 26  # float32: 256 MiB, more than any cache holds

Memory = Float[Array, " entries"]
Left = Float[Array, ""]


def memory() -> Memory:
    """Return what the passes go over."""
    return jnp.linspace(0.0, 1.0, ENTRIES, dtype=jnp.float32)


def passes_over(x: Memory) -> Left:
    """Read memory, pass after pass: each needs what the one before it found, to the last entry."""
    left = jnp.zeros((), x.dtype)
    for _ in range(PASSES):
        left = jnp.max(jnp.abs(x - left))
    return left


def calls_of(micros: float) -> int:
    """Return how many calls one program makes: more of short ones.

    Args:
        micros: that a call takes, about.
    """
    if jax.default_backend() == "cpu":
        return 1
    steps = (1000, 1), (100, 2), (0, 4)
    return next(calls for least, calls in steps if micros >= least)


def compiler_options() -> dict[str, Any]:
    """Have XLA choose by time as ever, without a check of what each candidate gives: minutes.

    Kernels are launched one by one: a record names those of a CUDA graph by the graph alone.
    """
    options = {"xla_gpu_autotune_level": 2, "xla_gpu_enable_command_buffer": ""}
    return options if jax.default_backend() == "gpu" else {}
