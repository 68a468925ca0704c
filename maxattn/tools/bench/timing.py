"""How long functions take on the device, without the host's share.

All are compiled first, several at a time, and timed in turns. Calls of a few milliseconds and more
are queued, several between two waits, so that the device never idles. For shorter ones the host's
dispatch would show: several calls, each on its own random inputs, are compiled into one program.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

import jax

from maxattn.tools.bench.profile import Profile, device_time

# The command prints it: a measurement can take minutes.
log = logging.getLogger("maxattn.tools.bench")
T = TypeVar("T")
BATCHES = 5
# Queued at a time; and where there are several devices: of more programs with collectives XLA's CPU
# finishes none.
MOST_CALLS, ON_SEVERAL = 400, 20
LONG = 0.1  # seconds, from which fewer batches will do


@dataclass(frozen=True)
class TimedFunction:
    """Hold a function to measure.

    Args:
        f: of arrays.
        make: returns its inputs: several tuples of arguments of one shape.
        around: a context in which it is traced and compiled; functions that have one are compiled
            one at a time.
        name: what progress is told by.
    """

    f: Callable[..., Any]
    make: Callable[[], list[tuple[Any, ...]]]
    around: Callable[[], AbstractContextManager[Any]] | None = None
    name: str = ""


@dataclass(frozen=True)
class Timed:
    """Hold what was measured of one function.

    Args:
        seconds: median of one call; 0 where it failed.
        peak: bytes of arguments, results and temporaries of one call, as the compiler reports them.
        first: result of the first call, or None.
        failed: why there is none.
        profile: device time by kernel, where it was asked for.
        rounds: seconds of one call in each round; long calls stop after the first rounds.
    """

    seconds: float = 0.0
    peak: int = 0
    first: Any = None
    failed: str = ""
    profile: Profile = field(default_factory=Profile)
    rounds: tuple[float, ...] = ()


def measure(
    functions: Sequence[TimedFunction],
    budget: float,
    workers: int = 0,
    options: Mapping[str, Any] | None = None,
    profiled: bool = False,
) -> list[Timed]:
    """Return the device time of functions.

    Args:
        functions: what to measure.
        budget: seconds to spend on each, about.
        workers: how many are compiled at a time; 0 for half of the cores.
        options: of XLA's compiler.
        profiled: whether to record one more call of each with the profiler.
    """
    ready = _all_compiled(functions, workers, dict(options or {}))
    warm = [_warmed(*each) for each in _told(functions, ready)]
    log.info("timing %s of them in turns", sum(not each.failed for each in warm))
    times = _timed_in_turns(ready, [_calls(each, budget) for each in warm])
    found = [_result(*each) for each in zip(ready, warm, times, strict=True)]
    if not profiled:
        return found
    pairs = zip(found, ready, strict=True)
    return [replace(t, profile=_profile(*one)) if t.seconds else t for t, one in pairs]


def _all_compiled(
    functions: Sequence[TimedFunction], workers: int, options: dict[str, Any]
) -> list[tuple[Any, Any]]:
    """Compile several at a time, and those that need a context of their own one at a time."""
    compiled = partial(_compiled, options=options)
    with ThreadPoolExecutor(workers or max(1, (os.cpu_count() or 2) // 2)) as pool:
        jobs = [None if work.around else pool.submit(compiled, work) for work in functions]
        pairs = zip(functions, jobs, strict=True)
        return [job.result() if job else compiled(work) for work, job in pairs]


def _timed_in_turns(
    ready: list[tuple[Any, Any]], batches: list[tuple[int, int]]
) -> list[list[float]]:
    """Return the seconds of one call of each program, once a round.

    A round measures each of them once: the first after a pause finds a cool chip, and would win by
    3% or more. One that needs much power leaves low clocks to the next: which that is changes.
    """
    times: list[list[float]] = [[] for _ in ready]
    turns = list(zip(ready, batches, times, strict=True))
    for i in range(BATCHES):
        for (program, inputs), (rounds, calls), found in in_order(i, turns):
            if i < rounds:
                found.append(queue(program, inputs, calls) / calls)
    return times


def _told(functions: Sequence[TimedFunction], ready: list[T]) -> Iterator[T]:
    """Yield what is ready, and say which is run."""
    for number, (work, each) in enumerate(zip(functions, ready, strict=True), start=1):
        log.info("running %s/%s  %s", number, len(ready), work.name)
        yield each


def in_order(i: int, jobs: list[T]) -> list[T]:
    """Return the order of round i, in which most follow another than in the rounds before.

    First, second, last, third, last but one, ..., then backwards; and so on, begun one further
    every other round.
    """
    n = len(jobs)
    order = [((j + 1) // 2 if j % 2 else -(j // 2)) + i // 2 for j in range(n)]
    return [jobs[j % n] for j in (reversed(order) if i % 2 else order)]


def _profile(program: Any, inputs: Any) -> Profile:
    return device_time(lambda: jax.block_until_ready(program(inputs)))


def _compiled(work: TimedFunction, options: dict[str, Any]) -> tuple[Any, Any]:
    log.info("compiling %s", work.name)
    try:
        inputs = work.make()
        one = jax.jit(work.f)
        with (work.around or nullcontext)():
            program = jax.jit(lambda sets: several(one, sets), compiler_options=options)
            return program.lower(inputs).compile(), inputs
    except Exception as failed:  # any, of a compiler or a device
        return None, first_line(failed)


def several(f: Callable[..., Any], sets: list[tuple[Any, ...]]) -> list[Any]:
    """Call one after the other, or the compiler would keep parts of several calls in memory."""
    found: list[Any] = []
    for inputs in sets:
        if found:
            inputs, _ = jax.lax.optimization_barrier((inputs, found[-1]))
        found.append(f(*inputs))
    return found


def _warmed(program: Any, inputs: Any) -> Timed:
    """Run a program twice: the result of its first call and the seconds of the second run."""
    if program is None:
        return Timed(failed=inputs)
    try:
        first = jax.block_until_ready(program(inputs))[0]
        return Timed(queue(program, inputs, 1), _peak(program, len(inputs)), first)
    except Exception as failed:  # any, of a compiler or a device
        return Timed(failed=first_line(failed))


def first_line(failed: Exception) -> str:
    """Say which failure it was, and the first line of it."""
    first, *_ = str(failed).strip().splitlines() or [""]
    return f"{type(failed).__name__}: {first[:160]}"


def _calls(warm: Timed, budget: float) -> tuple[int, int]:
    """Return (rounds, calls in each); none where it failed."""
    if warm.failed:
        return 0, 0
    rounds = BATCHES if warm.seconds < LONG else 3
    most = MOST_CALLS if jax.device_count() == 1 else ON_SEVERAL
    return rounds, max(1, min(most, int(budget / rounds / warm.seconds)))


def _result(ready: tuple[Any, Any], warm: Timed, times: list[float]) -> Timed:
    if not times:
        return warm
    rounds = tuple(seconds / len(ready[1]) for seconds in times)
    return replace(warm, seconds=median(rounds), rounds=rounds)


def queue(program: Any, inputs: Any, calls: int) -> float:
    start, out = perf_counter(), None
    for _ in range(calls):
        out = program(inputs)
    jax.block_until_ready(out)
    return perf_counter() - start


def _peak(program: Any, calls: int) -> int:
    memory = program.memory_analysis()
    if memory is None:
        return 0
    each = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return each // calls + memory.temp_size_in_bytes
