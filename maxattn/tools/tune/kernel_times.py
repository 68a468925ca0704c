"""Time the kernels of one call in turns on one device, the forward and the backward apart.

Lengths and ids are arguments of what is compiled, as they are in a model: what is prepared of them
on the device counts. Short calls stand several in a program, so that the host is ahead of the
device, and are timed by the device's clock (bench/behind.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels import Kernel, scores_of
from maxattn.kernels.base import Inputs, Rows
from maxattn.masks import Mask
from maxattn.tools.bench.behind import Behind, calls_of, seconds_behind
from maxattn.tools.bench.timing import first_line, in_order, queue
from maxattn.tools.random_inputs import normal

log = logging.getLogger("maxattn.tools.bench")
SECONDS, ROUNDS = 0.3, 7  # of a kernel's pass
MOST_CALLS, LONG = 200, 0.1  # that are queued in a round; seconds, from which 3 rounds do

Programs = dict[str, Behind | str]
"""The compiled pass of each kernel, or why it does not compile."""


class PassTimes(NamedTuple):
    """Hold what was measured of a pass.

    Attributes:
        ms: of each round, by kernel.
        failed: why others did not run.
        is_dead: whether the device stopped answering, by the last one that failed.
    """

    ms: dict[str, tuple[float, ...]]
    failed: dict[str, str]
    is_dead: bool = False


def time_pass(
    kernels: Mapping[str, Kernel], what: str, call: Call, mask: Mask, of: str = ""
) -> PassTimes:
    """Compile and time a pass of each kernel.

    Args:
        kernels: built for the call, by name.
        what: the pass.
        call: of one device.
        mask: of the call, with its arrays.
        of: the kernel whose output and LSE a backward begins with.
    """
    sets = random_sets(call, mask)
    programs = compiled(kernels, what, sets)
    if what == "backward":
        run = jax.jit(partial(forward, kernels[of]))
        sets = [(*each, *run(*each)) for each in sets]
    return timed(programs, what, sets, SECONDS)


def compiled(kernels: Mapping[str, Kernel], what: str, sets: list[Any]) -> Programs:
    """Compile a pass of each kernel, several at a time; `sets` are inputs or their specs."""

    def compile_one(name: str) -> Behind | str:
        log.info("compiling %s, %s", name, what)
        try:
            run, its = partial(forward, kernels[name]), sets
            if what == "backward":
                results = jax.eval_shape(lambda sets: [run(*each) for each in sets], sets)
                its = [(*each, *result) for each, result in zip(sets, results, strict=True)]
                run = partial(backward, kernels[name])
            return Behind.of(run, its, f"{name}, {what}")
        except Exception as failed:  # any, of a compiler
            return first_line(failed)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(kernels, pool.map(compile_one, kernels), strict=True))


def timed(programs: Programs, what: str, sets: list[Any], seconds: float) -> PassTimes:
    """Time compiled programs in turns; a device that was lost says nothing more.

    Args:
        programs: from `compiled`.
        what: the pass.
        sets: what they read.
        seconds: for each of them, about.
    """
    failed = {name: f"{what}: {why}" for name, why in programs.items() if isinstance(why, str)}
    ready: dict[str, Behind] = {}
    taken = {}
    for number, (name, program) in enumerate(programs.items(), start=1):
        if isinstance(program, str):
            continue
        log.info("running %s/%s  %s, %s", number, len(programs), name, what)
        try:
            jax.block_until_ready(program(sets))
            taken[name] = queue(program, sets, 1)
            ready[name] = program
        except Exception as error:  # any, of a device
            failed[name] = f"{what}: {first_line(error)}"
            if not answers():
                return PassTimes({}, {name: failed[name]}, True)
    rounds = ROUNDS if max(taken.values(), default=0) < LONG else 3
    if len(sets) > 1 and ready:
        found = dict(zip(ready, seconds_behind([*ready.values()], sets, ROUNDS), strict=True))
    else:
        found = {name: [] for name in ready}
        for at in range(rounds):
            for name in in_order(at, list(ready)):
                calls = max(1, min(MOST_CALLS, int(seconds / rounds / taken[name])))
                found[name].append(queue(ready[name], sets, calls) / calls)
    ms = {n: tuple(float(f"{1e3 * x:.5g}") for x in its) for n, its in found.items()}
    return PassTimes(ms, failed)


def answers() -> bool:
    """Tell whether the device still computes."""
    try:
        return float(jnp.zeros(()) + 1) == 1
    except Exception:  # whatever a lost device raises
        return False


# ---- what is timed -------------------------------------------------------------------------------


def forward(kernel: Kernel, q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
    """Return the output and the LSE; the output's gradient is not read."""
    return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))


def backward(kernel: Kernel, *arrays: Any) -> Any:
    """Return dq, dk and dv in the dtypes of q, k and v, from what `forward` took and gave."""
    q, k, v, dout, mask, out, lse = arrays
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)


def random_sets(call: Call, mask: Mask) -> list[tuple[Any, ...]]:
    """Make random (q, k, v, dout, mask): several of short calls, which one program computes."""
    q = (call.batch, call.q_len, call.heads, call.head_dim)
    k, v = ((*q[:1], call.kv_len, call.kv_heads, dim) for dim in (call.head_dim, call.value_dim))
    make = jax.jit(partial(normal, dtype=call.dtype), static_argnums=1)
    dims = (q, k, v, (*q[:3], call.value_dim))
    keys = jax.random.split(jax.random.key(0), (inputs_of(call), len(dims)))
    of_device = jax.tree.map(jnp.asarray, mask)
    return [
        (*(make(key, dim) for key, dim in zip(row, dims, strict=True)), of_device) for row in keys
    ]


def inputs_of(call: Call) -> int:
    """Return how many calls one program makes, so that the host's share does not show."""
    products = 4.0 * scores_of(call) * call.head_dim / 5e14
    tokens = call.q_len * call.heads + call.kv_len * call.kv_heads
    return calls_of(1e6 * max(products, 4.0 * call.batch * call.head_dim * tokens / 3e12))
