"""Time the kernels of one call on one device in turns, first the forward, then the backward.

A mask's lengths and segment ids are arguments of the compiled program, as in a model, so a
kernel's time includes its work on the device to prepare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels import scores_of
from maxattn.kernels.base import Kernel
from maxattn.masks import Mask
from maxattn.measuring.passes import backward, forward, random_inputs
from maxattn.measuring.timing import (
    Timed,
    TimedFunction,
    TimedProgram,
    calls_of,
    compile_all,
    measure,
    record_options,
    time_all,
)

SECONDS, ROUNDS = 0.3, 7  # seconds to time one pass of a kernel, and rounds


class PassTimes(NamedTuple):
    """By kernel: ms of each round, or why the kernel failed. `is_dead`: after a kernel failed, the
    device stopped answering.
    """

    ms: dict[str, tuple[float, ...]]
    failed: dict[str, str]
    is_dead: bool = False


def time_pass(
    kernels: Mapping[str, Kernel], what: str, call: Call, mask: Mask, of: str = ""
) -> PassTimes:
    """Compile and time a pass of built kernels; backwards read the output and LSE of `of`."""
    sets = random_sets(call, mask)
    programs = compile_pass(kernels, what, sets)
    if what == "backward":
        run = jax.jit(partial(forward, kernels[of]))
        sets = [(*each, *run(*each)) for each in sets]
    return time_programs(programs, what, sets, SECONDS)


def compile_pass(
    kernels: Mapping[str, Kernel], what: str, sets: list[Any]
) -> dict[str, TimedProgram]:
    """Compile a pass of each kernel; `sets` are inputs of the forward, as arrays or specs."""

    def work(name: str) -> TimedFunction:
        run = partial(forward, kernels[name])

        def make() -> list[Any]:
            if what == "forward":
                return sets
            results = jax.eval_shape(lambda sets: [run(*each) for each in sets], sets)
            return [(*each, *result) for each, result in zip(sets, results, strict=True)]

        f = run if what == "forward" else partial(backward, kernels[name])
        return TimedFunction(f, make, name=f"{name}, {what}")

    programs = compile_all([work(name) for name in kernels], record_options())
    return dict(zip(kernels, programs, strict=True))


def time_programs(
    programs: Mapping[str, TimedProgram], what: str, sets: Sequence[Any], seconds: float
) -> PassTimes:
    """Time compiled programs in turns; if the device is lost, return only the failure."""
    ready = [replace(program, inputs=sets) for program in programs.values()]
    timed = dict(zip(programs, time_all(ready, seconds, ROUNDS, len(sets) > 1), strict=True))
    failed = {name: f"{what}: {its.failed}" for name, its in timed.items() if its.failed}
    stopped = next((name for name in failed if not programs[name].failed), None)
    if stopped and not answers():
        return PassTimes({}, {stopped: failed[stopped]}, True)
    ms = {n: tuple(float(f"{1e3 * x:.5g}") for x in its.rounds) for n, its in timed.items()}
    return PassTimes({name: its for name, its in ms.items() if its}, failed)


def answers() -> bool:
    """Return whether the device still answers."""
    try:
        return float(jnp.zeros(()) + 1) == 1
    except Exception:  # whatever a lost device raises
        return False


def time_sizes(kernel: Kernel, call: Call, training: bool) -> Timed:
    """Time one kernel on a call: forward and backward in one program, or the forward alone."""

    def step(*arrays: Array) -> Any:
        out, lse = forward(kernel, *arrays, call.mask)
        return out, backward(kernel, *arrays, call.mask, out, lse)

    def alone(*arrays: Array) -> Any:
        return forward(kernel.for_inference(), *arrays, call.mask)[0]

    f = step if training else alone
    return measure([TimedFunction(f, lambda: random_inputs(call, 1))], SECONDS)[0]


# ---- inputs -------------------------------------------------------------------------------------


def random_sets(call: Call, mask: Mask) -> list[tuple[Any, ...]]:
    """Draw sets of (q, k, v, dout, mask): several if a call is short, all for one program."""
    of_device = jax.tree.map(jnp.asarray, mask)
    return [(*each, of_device) for each in random_inputs(call, inputs_of(call))]


def inputs_of(call: Call) -> int:
    """Return how many calls to put in one program, so that the host's launch time is hidden."""
    products = 4.0 * scores_of(call) * call.head_dim / 5e14
    tokens = call.q_len * call.heads + call.kv_len * call.kv_heads
    return calls_of(1e6 * max(products, 4.0 * call.batch * call.head_dim * tokens / 3e12))
