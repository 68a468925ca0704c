"""Compile every kernel that can run a call of a grid, and time them in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, refusal
from maxattn.kernels.base import Inputs, Rows
from maxattn.masks import Mask
from maxattn.target import Target
from maxattn.tools.bench.grid import busy
from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.grid.job import GridJob, device_held
from maxattn.tools.bench.grid.rows import GridRow, GridTime, is_measured
from maxattn.tools.bench.jobs import with_gradient
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD
from maxattn.tools.bench.timing import first_line, in_order, queue, several
from maxattn.tools.random_inputs import normal

ROUNDS, MOST_CALLS = 5, 200
BUSY, BUSY_CALLS = ("", "busy"), 4  # its key among what is timed, and calls a round
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
    kernel = KERNELS[name].build(call.shape().call(), AttentionConfig(), target)

    def forward(q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
        return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))

    def backward(inputs: tuple[Any, ...], result: tuple[Array, Array]) -> Any:
        (q, k, v, dout, mask), (out, lse) = inputs, result
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
        return dq, dk.astype(k.dtype), dv.astype(v.dtype)

    sets = _sets(call)
    first, results = _lowered(forward, sets), jax.eval_shape(partial(several, forward), sets)
    after = [tuple(each) for each in zip(sets, results, strict=True)]
    return [(FORWARD, first), (BACKWARD, _lowered(backward, after))]


def _of_peer(name: str, call: GridCall) -> list[tuple[str, Any]]:
    """Compile another library's function, and with its gradient."""
    attend = PEERS[name]()

    def forward(q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
        return attend(q, k, v)

    def both(q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
        return with_gradient(attend)(q, k, v, dout)

    sets = _sets(call)
    return [(FORWARD, _lowered(forward, sets)), (BOTH, _lowered(both, sets))]


def _sets(call: GridCall) -> list[tuple[Any, ...]]:
    return [(*_specs(call), _mask_specs(call))] * inputs_of(call)


def _lowered(f: Callable[..., Any], sets: list[Any]) -> Any:
    one = jax.jit(f)
    if len(sets) == 1:
        return jax.jit(lambda each: several(one, each)).lower(sets).compile(busy.compiler_options())
    memory = jax.eval_shape(busy.memory)
    work = jax.jit(busy.several_behind(one)).lower(memory, sets)
    return BehindWork(work.compile(busy.compiler_options()))


class BehindWork(NamedTuple):
    """Call a program that begins with passes over memory, and return what comes after them."""

    compiled: Any

    def __call__(self, memory: busy.Memory, sets: list[Any]) -> list[Any]:
        """Return the results of all sets."""
        return self.compiled(memory, sets)[0]


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
    before = (busy.memory(),) if len(sets) > 1 else ()
    ready: list[_Turn] = [_busy_alone(*before)] if before else []
    for kernel in kernels:
        if kernel.passes:
            ready += _warmed(kernel, sets, before, seconds)
    found: dict[tuple[str, str], list[float]] = {turn.key: [] for turn in ready}
    for i in range(ROUNDS):
        for turn in in_order(i, ready):
            found[turn.key].append(turn.seconds(turn.calls))
    off = median(found.pop(BUSY)) if before else 0.0
    times: dict[str, GridTime] = {FORWARD: {}, BACKWARD: {}}
    for (what, name), each in found.items():
        taken = busy.each_of(median(each), off, len(sets))
        times.setdefault(what, {})[name] = round(1e3 * taken, 5)
    return times


class _Turn(NamedTuple):
    """Hold what is timed in a round: (pass, kernel), the program, its inputs, calls a round."""

    key: tuple[str, str]
    program: Any
    inputs: tuple[Any, ...]
    calls: int = 1

    def seconds(self, calls: int) -> float:
        """Return the seconds of one call, of several in a queue."""
        return queue(lambda inputs: self.program(*inputs), self.inputs, calls) / calls


def _busy_alone(memory: busy.Memory) -> _Turn:
    program = jax.jit(busy.pass_over).lower(memory).compile()
    turn = _Turn(BUSY, program, (memory,), BUSY_CALLS)
    turn.seconds(1)
    return turn


def _random_sets(call: GridCall, key: Array) -> list[tuple[Any, ...]]:
    shape, mask = call.shape(), jax.tree.map(jnp.asarray, _mask(call))
    dims = [spec.shape for spec in _specs(call)]
    keys = jax.random.split(key, (inputs_of(call), len(dims)))
    drawn = [[normal(k, d, shape.dtype) for k, d in zip(x, dims, strict=True)] for x in keys]
    return [(*each, mask) for each in drawn]


def _warmed(
    kernel: _Programs, sets: list[Any], before: tuple[Any, ...], seconds: float
) -> list[_Turn]:
    """Run both passes twice, and return what is timed."""
    ready, inputs = [], sets
    try:
        for what, program in kernel.passes:
            inputs = inputs if what == BACKWARD else sets
            turn = _Turn((what, kernel.name), program, (*before, inputs))
            results = jax.block_until_ready(program(*turn.inputs))
            calls = max(1, min(MOST_CALLS, int(seconds / ROUNDS / turn.seconds(1))))
            ready.append(turn._replace(calls=calls))
            inputs = [tuple(each) for each in zip(sets, results, strict=True)]
    except Exception as failed:  # any, of a device
        kernel.failed = first_line(failed)
    return ready
