"""How long a function takes on the device, without the host's share.

Calls of a few milliseconds and more are queued, several between two waits, so that the device never idles. For shorter
ones the host's dispatch would show: there several calls, each on its own random inputs, are compiled into one program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import jax

LONG_CALL = 4e-3  # seconds, from which calls are queued one by one
BATCHES = 5


def seconds(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], budget: float = 0.5) -> float:
    """Return the median device time of one call of `f`.

    Args:
        f: a function of arrays.
        inputs: several tuples of arguments of the same shapes, different numbers.
        budget: seconds to spend, about.
    """
    one = jax.jit(f)
    _run(one, *inputs[0])
    estimate = min(_run(one, *inputs[0]) for _ in range(2))
    if estimate >= LONG_CALL:
        calls = max(1, min(10, int(budget / estimate / 3)))
        return median(_queue(one, inputs, calls) / calls for _ in range(3))
    every = jax.jit(lambda sets: [one(*each) for each in sets])
    _run(every, inputs)
    estimate = _run(every, inputs)
    calls = max(1, min(20, int(budget / BATCHES / estimate)))
    return median(_queue(every, [(inputs,)], calls) / calls for _ in range(BATCHES)) / len(inputs)


def _run(f: Callable[..., Any], *args: Any) -> float:
    start = perf_counter()
    jax.block_until_ready(f(*args))
    return perf_counter() - start


def _queue(f: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int) -> float:
    start, out = perf_counter(), None
    for i in range(calls):
        out = f(*inputs[i % len(inputs)])
    jax.block_until_ready(out)
    return perf_counter() - start
