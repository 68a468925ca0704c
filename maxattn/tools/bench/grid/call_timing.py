"""Compile every kernel that can run a call of a grid, and time them in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, build, refusal
from maxattn.masks import Mask
from maxattn.target import Target
from maxattn.tools.bench.grid import busy, kernel_passes
from maxattn.tools.bench.grid.behind import Behind, seconds_behind
from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.grid.job import GridJob, device_held
from maxattn.tools.bench.grid.rows import GridRow, GridTime, is_measured
from maxattn.tools.bench.jobs import with_gradient
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD
from maxattn.tools.bench.timing import first_line, in_order, queue, several
from maxattn.tools.random_inputs import normal

ROUNDS, MOST_CALLS = 7, 200
BARE = ("jax cuDNN", "fa4-jax")  # what others may reach that ours do not
Specs = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class CompiledCall:
    """Hold every kernel that can run a call, compiled.

    Args:
        call: of the grid.
        programs: of each kernel.
        make: makes the inputs from a key.
        spent: seconds.
    """

    call: GridCall
    programs: list[_Programs]
    make: Any
    spent: float

    @classmethod
    def of(cls, job: GridJob, at: int, target: Target) -> CompiledCall:
        """Compile a call of a job: the `at`-th."""
        start, call = perf_counter(), job.calls[at]
        names = _kernels(job, at, target)
        programs = [_Programs.of(n, partial(_of_kernel, n, call, target)) for n in names]
        if job.has_peers(at):
            programs += [_Programs.of(f"bare {n}", partial(_of_peer, n, call)) for n in BARE]
        make = jax.jit(partial(_random_sets, call)).lower(jax.random.key(0)).compile()
        return cls(call, programs, make, perf_counter() - start)

    def timed(self, job: GridJob) -> GridRow:
        """Time all kernels in turns, while no other process uses the device."""
        with device_held(job.folder):
            taken = perf_counter()
            times = _timed(self.programs, self.make(jax.random.key(0)), job.seconds)
        failed = {p.name: p.failed for p in self.programs if p.failed}
        return GridRow(self.call, times, failed, (self.spent, perf_counter() - taken))


def _kernels(job: GridJob, at: int, target: Target) -> list[str]:
    call = job.calls[at]
    asked = [n for n in job.kernels or KERNELS if is_measured(n, call)]
    return [n for n in asked if refusal(n, call.shape().call(), target) is None]


@dataclass
class _Programs:
    """Hold the compiled passes of a kernel over several inputs: (what, program, what it reads)."""

    name: str
    passes: list[tuple[str, Any]]
    failed: str = ""

    @classmethod
    def of(cls, name: str, compile_all: Callable[[], list[tuple[str, Any]]]) -> _Programs:
        try:
            return cls(name, compile_all())
        except Exception as failed:  # any, of a compiler
            return cls(name, [], first_line(failed))


def _of_kernel(name: str, call: GridCall, target: Target) -> list[tuple[str, Any]]:
    """Compile both passes without a run on the device."""
    kernel = build(name, call.shape().call(), AttentionConfig(), target)
    sets, first = _sets(call), partial(kernel_passes.forward, kernel)
    results = jax.eval_shape(partial(several, first), sets)
    after = [(*given, *result) for given, result in zip(sets, results, strict=True)]
    then = partial(kernel_passes.backward, kernel)
    return [
        (FORWARD, _compiled(first, sets, f"forward {name}")),
        (BACKWARD, _compiled(then, after, f"backward {name}")),
    ]


def _of_peer(name: str, call: GridCall) -> list[tuple[str, Any]]:
    """Compile another library's function, and with its gradient."""
    attend = PEERS[name]()

    def forward(q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
        return attend(q, k, v)

    def both(q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
        return with_gradient(attend)(q, k, v, dout)

    sets = _sets(call)
    compiled = partial(_compiled, sets=sets)
    return [
        (FORWARD, compiled(forward, name=f"forward bare {name}")),
        (BOTH, compiled(both, name=f"both bare {name}")),
    ]


def _sets(call: GridCall) -> list[tuple[Any, ...]]:
    return [(*_specs(call), _mask_specs(call))] * inputs_of(call)


def _compiled(f: Callable[..., Any], sets: list[Any], name: str) -> Any:
    """Compile one call, or several behind passes over memory."""
    one = jax.jit(f)
    if len(sets) > 1:
        return Behind.of(one, sets, name)
    return jax.jit(lambda each: several(one, each)).lower(sets).compile(busy.compiler_options())


def inputs_of(call: GridCall) -> int:
    """Return how many calls one program makes, each of its own inputs."""
    return busy.calls_of(max(4 * call.pairs * call.sizes[5] / 5e8, call.bytes / 3e6))


def _specs(call: GridCall) -> Specs:
    b, t, s, n, k, h = call.sizes
    dtype = call.shape().dtype
    q, kv = (jax.ShapeDtypeStruct((b, *x, h), dtype) for x in ((t, n), (s, k)))
    return q, kv, kv, q


def _mask(call: GridCall) -> Mask:
    shape = call.shape()
    return shape.mask.bind(shape.q_len, shape.kv_len, shape.batch, shape.heads)


def _mask_specs(call: GridCall) -> Mask:
    like = lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))  # noqa: E731
    return jax.tree.map(like, _mask(call))


# ---- with the device -----------------------------------------------------------------------------


def _timed(kernels: list[_Programs], sets: list[Any], seconds: float) -> dict[str, GridTime]:
    """Time the passes of all kernels in turns."""
    ready = [turn for each in kernels for turn in _warmed(each, sets, seconds)]
    times: dict[str, GridTime] = {FORWARD: {}, BACKWARD: {}}
    for turn, taken in zip(
        ready, _behind(ready) if len(sets) > 1 else _in_turns(ready), strict=True
    ):
        its, name = times.setdefault(turn.key[0], {}), turn.key[1]
        if not isnan(middle := median(taken)):  # else it was too short to tell
            its[name] = round(1e3 * middle, 5)
    return times


class _Turn(NamedTuple):
    """Hold what is timed in a round: (pass, kernel), the program, its inputs, calls a round."""

    key: tuple[str, str]
    program: Any
    inputs: list[Any]
    calls: int = 1


def _behind(ready: list[_Turn]) -> list[tuple[float, ...]]:
    """Return the seconds of short calls, once a round."""
    return seconds_behind([(turn.program, turn.inputs) for turn in ready], ROUNDS)


def _in_turns(ready: list[_Turn]) -> list[list[float]]:
    """Return the seconds of long calls, once a round."""
    found: list[list[float]] = [[] for _ in ready]
    for i in range(ROUNDS):
        for turn, taken in in_order(i, list(zip(ready, found, strict=True))):
            taken.append(queue(turn.program, turn.inputs, turn.calls) / turn.calls)
    return found


def _random_sets(call: GridCall, key: Array) -> list[tuple[Any, ...]]:
    shape, mask = call.shape(), jax.tree.map(jnp.asarray, _mask(call))
    dims = [spec.shape for spec in _specs(call)]
    keys = jax.random.split(key, (inputs_of(call), len(dims)))
    drawn = [[normal(k, d, shape.dtype) for k, d in zip(x, dims, strict=True)] for x in keys]
    return [(*each, mask) for each in drawn]


def _warmed(kernel: _Programs, sets: list[Any], seconds: float) -> list[_Turn]:
    """Run both passes twice, and return what is timed."""
    ready, inputs = [], sets
    try:
        for what, program in kernel.passes:
            inputs = inputs if what == BACKWARD else sets
            results = jax.block_until_ready(program(inputs))
            taken = queue(program, inputs, 1)
            calls = max(1, min(MOST_CALLS, int(seconds / ROUNDS / taken)))
            ready.append(_Turn((what, kernel.name), program, inputs, calls))
            inputs = [(*given, *result) for given, result in zip(sets, results, strict=True)]
    except Exception as failed:  # any, of a device
        kernel.failed = first_line(failed)
    return ready
