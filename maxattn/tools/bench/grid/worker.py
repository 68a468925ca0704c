"""A process that compiles calls of a grid beside others, and then times them alone.

Tracing and compiling take the host's time, and of some kernels seconds of Python. Timing needs the
device alone, and the host too: what is compiled beside it makes times longer, by a third of short
ones. So many processes compile first; when all have done, or the time for it is up, each times what
it compiled, one process at a time, by a lock on a file. Rows are written when they are there.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, time
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.config import AttentionConfig
from maxattn.kernels import KERNELS, refusal
from maxattn.kernels.base import Inputs, Rows
from maxattn.masks import Mask
from maxattn.target import Target
from maxattn.tools.bench.grid.calls import FULL, GridCall
from maxattn.tools.bench.grid.rows import GridRow, GridTime, is_measured
from maxattn.tools.bench.jobs import with_gradient
from maxattn.tools.bench.peers import PEERS
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD
from maxattn.tools.bench.timing import first_line, in_order, queue, several
from maxattn.tools.random_inputs import normal

ROUNDS, MOST_CALLS = 5, 200
LONGEST = 40.0  # seconds that others wait for one that still compiles
LOCK, HOLDER = "lock", "holder"  # files: of the device, and of the process that holds it
BARE = ("jax cuDNN", "fa4-jax")  # what others may reach that ours do not
Specs = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class GridJob:
    """Say what the processes of a grid do.

    Args:
        folder: where rows, claims and the lock are.
        calls: of the grid, in the order in which they are measured.
        seconds: for one kernel and pass of a call, about.
        workers: how many processes there are.
        until: the time of day, in seconds, after which none is compiled.
        kernels: names; empty for all that can run.
        peers: measure other libraries too, called bare, on every so manieth call of all pairs; 0
            for none.
    """

    folder: Path
    calls: tuple[GridCall, ...]
    seconds: float
    workers: int
    until: float
    kernels: tuple[str, ...] = ()
    peers: int = 0

    def has_peers(self, at: int) -> bool:
        """Tell whether other libraries are measured on a call, called bare."""
        call = self.calls[at]
        return self.peers > 0 and at % self.peers == 0 and call.kind == FULL

    def write(self) -> Path:
        """Write it for the processes."""
        path = self.folder / "job.json"
        calls = [call.to_json() for call in self.calls]
        rest = self.seconds, self.workers, self.until, self.kernels, self.peers
        path.write_text(json.dumps([calls, *rest]))
        return path

    @staticmethod
    def read(path: Path) -> GridJob:
        """Read what another process wrote."""
        calls, seconds, workers, until, kernels, peers = json.loads(path.read_text())
        read = tuple(map(GridCall.of_json, calls))
        return GridJob(path.parent, read, seconds, workers, until, tuple(kernels), peers)


def main(path: str, number: str) -> None:
    """Compile calls until none is left, or the time is up; then time them."""
    job, target = GridJob.read(Path(path)), Target.here()
    ready = list(_all_compiled(job, int(number), target))
    _wait_for_all(job, number)
    with (job.folder / f"rows-{number}.jsonl").open("a") as file:
        for each in ready:
            row = each.timed(job)
            print(json.dumps(row.to_json() | {"device": target.device_kind}), file=file, flush=True)
            print(f"{number}: {row.call.name}  {row.summary}", flush=True)
            if not row.forward:  # a device error stays with its process: another would fail alike
                return


def _all_compiled(job: GridJob, number: int, target: Target) -> Iterator[CompiledCall]:
    """Yield calls, compiled, until the time is up."""
    for at in _mine_first(job.calls, number, job.workers):
        if time() > job.until:
            return
        if not _claimed(job.folder / f"claim-{at}"):
            continue
        try:
            yield CompiledCall.of(job, at, target)
        except Exception as failed:  # any, of a compiler
            print(f"{number}: {job.calls[at].name} failed: {first_line(failed)}", flush=True)


def _wait_for_all(job: GridJob, number: str) -> None:
    """Wait until no process compiles, and no longer than a compilation may last."""
    (job.folder / f"ready-{number}").touch()
    while len(list(job.folder.glob("ready-*"))) < job.workers and time() < job.until + LONGEST:
        sleep(0.1)


def _mine_first(calls: tuple[GridCall, ...], number: int, workers: int) -> Iterator[int]:
    """Yield every call, first those of this process: one compiles a head dim's kernels for all."""
    order = sorted(range(len(calls)), key=lambda i: (calls[i].dtype, calls[i].sizes[5], i))
    start = number * len(order) // workers
    mine = sorted(order[start : (number + 1) * len(order) // workers])
    yield from mine
    yield from (i for i in range(len(calls)) if i not in mine)


def _claimed(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@contextmanager
def _device(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / HOLDER).write_text(str(os.getpid()))
        yield
        (folder / HOLDER).unlink()


# ---- one call ------------------------------------------------------------------------------------


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
        with _device(job.folder):
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
    return jax.jit(lambda each: several(one, each)).lower(sets).compile()


def inputs_of(call: GridCall) -> int:
    """Return how many calls one program makes, each of its own inputs: more of short ones, so that
    the host's share does not show.
    """
    if jax.default_backend() == "cpu":
        return 1
    micros = max(4 * call.pairs * call.sizes[5] / 5e8, call.bytes / 3e6)
    steps = (1000, 1), (300, 2), (100, 4), (15, 6), (0, 12)
    return next(sets for least, sets in steps if micros >= least)


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
    ready: list[tuple[Any, ...]] = []
    for kernel in kernels:
        if kernel.passes:
            ready += _warmed(kernel, sets, seconds)
    found: dict[tuple[str, str], list[float]] = {key: [] for key, *_ in ready}
    for i in range(ROUNDS):
        for key, program, inputs, calls in in_order(i, ready):
            found[key].append(queue(program, inputs, calls) / calls / len(sets))
    times: dict[str, GridTime] = {FORWARD: {}, BACKWARD: {}}
    for (what, name), each in found.items():
        times.setdefault(what, {})[name] = round(1e3 * median(each), 5)
    return times


def _random_sets(call: GridCall, key: Array) -> list[tuple[Any, ...]]:
    shape, mask = call.shape(), jax.tree.map(jnp.asarray, _mask(call))
    dims = [spec.shape for spec in _specs(call)]
    keys = jax.random.split(key, (inputs_of(call), len(dims)))
    drawn = [[normal(k, d, shape.dtype) for k, d in zip(x, dims, strict=True)] for x in keys]
    return [(*each, mask) for each in drawn]


def _warmed(kernel: _Programs, sets: list[Any], seconds: float) -> list[tuple[Any, ...]]:
    """Run both passes twice, and return what is timed: (key, program, inputs, calls a round)."""
    ready, inputs = [], sets
    try:
        for what, program in kernel.passes:
            inputs = inputs if what == BACKWARD else sets
            results = jax.block_until_ready(program(inputs))
            once = queue(program, inputs, 1)
            calls = max(1, min(MOST_CALLS, int(seconds / ROUNDS / once)))
            ready.append(((what, kernel.name), program, inputs, calls))
            inputs = [tuple(each) for each in zip(sets, results, strict=True)]
    except Exception as failed:  # any, of a device
        kernel.failed = first_line(failed)
    return ready


if __name__ == "__main__":
    main(*sys.argv[1:])
