"""Time the kernels of one call in turns on one device, the forward and the backward apart.

Lengths and ids are arguments of what is compiled, as they are in a model: what is prepared of them
on the device counts. Short calls stand several in a program, behind passes over memory, so that the
host is ahead of the device, and are timed by the device's clock (bench/grid/behind.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import Any

import jax
import jax.numpy as jnp

from maxattn.call import Call
from maxattn.kernels import Kernel, scores_of
from maxattn.masks import Mask
from maxattn.tools.bench.grid import busy, kernel_passes
from maxattn.tools.bench.grid.behind import Behind, seconds_behind
from maxattn.tools.bench.timing import Timed, TimedFunction, first_line, measure
from maxattn.tools.random_inputs import normal

log = logging.getLogger("maxattn.tools.bench")
SECONDS = 0.3  # for a kernel and pass, about; each of them runs seven times at least
ROUNDS = 7  # of short calls
FORWARD, BACKWARD = "forward", "backward"
Passes = dict[str, tuple[float, ...]]
"""Milliseconds of each round, by kernel."""


@dataclass(frozen=True)
class KernelTimes:
    """Hold what was measured.

    Args:
        forward, backward: of the kernels that ran.
        failed: why the others did not.
        is_dead: whether the device stopped answering, by the last one that failed.
    """

    forward: Passes = field(default_factory=dict)
    backward: Passes = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    is_dead: bool = False


def time_forward(kernels: Mapping[str, Kernel], call: Call, mask: Mask) -> KernelTimes:
    """Time the forward of each kernel.

    Args:
        kernels: built for the call, by name.
        call: of one device.
        mask: of the call, with its arrays.
    """
    functions = {name: partial(kernel_passes.forward, kernel) for name, kernel in kernels.items()}
    found = _measured(functions, FORWARD, _inputs(call, mask))
    times, failed, is_dead = found
    return KernelTimes(times, {}, failed, is_dead)


def time_backward(kernels: Mapping[str, Kernel], call: Call, mask: Mask, of: str) -> KernelTimes:
    """Time the backward of each kernel, from the output and the LSE of one forward.

    Args:
        kernels, call, mask: as for `time_forward`.
        of: the kernel whose forward that is.
    """
    inputs, forward = _inputs(call, mask), jax.jit(partial(kernel_passes.forward, kernels[of]))
    sets = [(*each, *forward(*each)) for each in inputs]
    functions = {name: partial(kernel_passes.backward, kernel) for name, kernel in kernels.items()}
    found = _measured(functions, BACKWARD, sets)
    times, failed, is_dead = found
    return KernelTimes({}, times, failed, is_dead)


def _measured(
    functions: Mapping[str, Callable[..., Any]], what: str, sets: list[tuple[Any, ...]]
) -> tuple[Passes, dict[str, str], bool]:
    """Measure functions on the same inputs, in turns."""
    names = {name: f"{name}, {what}" for name in functions}
    if len(sets) > 1:
        timed = _behind({names[name]: f for name, f in functions.items()}, sets)
    else:
        works = [TimedFunction(f, lambda: sets, name=names[n]) for n, f in functions.items()]
        timed = measure(works, SECONDS, options=busy.compiler_options())
    of = dict(zip(functions, timed, strict=True))
    failed = {name: f"{what}: {each.failed}" for name, each in of.items() if each.failed}
    return sorted_out(of, failed, answers())


def _behind(functions: Mapping[str, Callable[..., Any]], sets: list[Any]) -> list[Timed]:
    """Measure short calls behind passes over memory."""
    ready = {name: _ready(name, f, sets) for name, f in functions.items()}
    able = [(each, sets) for each in ready.values() if isinstance(each, Behind)]
    taken = iter(seconds_behind(able, ROUNDS) if able else [])
    return [
        _timed(next(taken)) if isinstance(each, Behind) else Timed(failed=each)
        for each in ready.values()
    ]


def _timed(rounds: tuple[float, ...]) -> Timed:
    if any(map(isnan, rounds)):
        return Timed(failed="it is too short to be told from the passes before it")
    return Timed(rounds=rounds)


def _ready(name: str, f: Callable[..., Any], sets: list[Any]) -> Behind | str:
    """Compile and run a function; or say why it fails."""
    log.info("compiling %s", name)
    try:
        program = Behind.of(jax.jit(f), sets, name)
        jax.block_until_ready(program(sets))
        return program
    except Exception as failed:  # any, of a compiler or a device
        return first_line(failed)


def sorted_out(
    timed: Mapping[str, Timed], failed: dict[str, str], is_alive: bool
) -> tuple[Passes, dict[str, str], bool]:
    """Return milliseconds by kernel, who failed, and whether the device is lost.

    A device that does not answer any more fails every kernel after the one that broke it: that one
    alone is said to have failed, and nothing else is known.
    """
    if not is_alive:
        first = next(iter(failed.items()), None)
        return {}, dict([first] if first else []), True
    times = {name: _rounds(each) for name, each in timed.items() if each.rounds}
    return times, failed, False


def _rounds(timed: Timed) -> tuple[float, ...]:
    return tuple(float(f"{1e3 * seconds:.5g}") for seconds in timed.rounds)


def answers() -> bool:
    """Tell whether the device still computes."""
    try:
        return float(jnp.zeros(()) + 1) == 1
    except Exception:  # whatever a lost device raises
        return False


# ---- what is timed -------------------------------------------------------------------------------


def _inputs(call: Call, mask: Mask) -> list[tuple[Any, ...]]:
    """Make random (q, k, v, dout, mask): several of short calls, which one program computes."""
    sets = inputs_of(call)
    q = (call.batch, call.q_len, call.heads, call.head_dim)
    k, v = ((*q[:1], call.kv_len, call.kv_heads, dim) for dim in (call.head_dim, call.value_dim))
    make = jax.jit(partial(normal, dtype=call.dtype), static_argnums=1)
    dims = (q, k, v, (*q[:3], call.value_dim))
    keys = jax.random.split(jax.random.key(0), (sets, len(dims)))
    of_device = jax.tree.map(jnp.asarray, mask)
    return [
        (*(make(key, dim) for key, dim in zip(row, dims, strict=True)), of_device) for row in keys
    ]


def inputs_of(call: Call) -> int:
    """Return how many calls one program makes, so that the host's share does not show."""
    pairs = 4.0 * scores_of(call) * call.head_dim
    tokens = call.q_len * call.heads + call.kv_len * call.kv_heads
    return busy.calls_of(max(pairs / 5e8, 4.0 * call.batch * call.head_dim * tokens / 3e6))
