"""Time functions on the device, without the host's share.

All functions are compiled first, several at a time, and then timed in turns. Calls of a few
milliseconds and more are queued between two waits, so that the device never idles.

The host takes 5 to 50 microseconds to launch a kernel. A shorter kernel would wait for the host,
which it does not in a model, where it follows longer ones. So several short calls, each on inputs
of its own, are compiled into one program. With `by_record` their times are read from the device's
own record, and passes over memory are queued before each program, so that the host is ahead. The
passes need little power, so that clocks stay as they are.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# The command line prints it: a measurement can take minutes.
log = logging.getLogger("maxattn.tools.bench")
T = TypeVar("T")
ROUNDS = 5
LONG, ROUNDS_OF_LONG = 0.1, 3  # seconds of a call from which fewer rounds will do
# Calls that are queued at a time, and where there are several devices: XLA's CPU finishes none of
# many programs with collectives.
MOST_CALLS, ON_SEVERAL = 400, 20


@dataclass(frozen=True)
class TimedFunction:
    """Name a function to measure.

    Args:
        f: of arrays.
        make: returns its inputs: several tuples of arguments of one shape, or their specs.
        around: a context to trace and compile in; such functions are compiled one at a time.
        name: for progress and records; another one for each function that is timed beside it.
        keeps_result: whether `Timed.first` is wanted.
    """

    f: Callable[..., Any]
    make: Callable[[], list[tuple[Any, ...]]]
    around: Callable[[], AbstractContextManager[Any]] | None = None
    name: str = "work"
    keeps_result: bool = False


@dataclass(frozen=True)
class TimedProgram:
    """Hold a compiled program that calls a function on each of its inputs, or why there is none."""

    work: TimedFunction
    compiled: Any = None
    inputs: Sequence[Any] = ()
    failed: str = ""

    @property
    def record(self) -> str:
        """The name of the program in a device's record."""
        return f"jit_{_symbol(self.work.name)}"

    def seconds(self, calls: int) -> float:
        """Run it so many times in a row, and return the seconds of all."""
        start, out = perf_counter(), None
        for _ in range(calls):
            out = self.compiled(self.inputs)
        jax.block_until_ready(out)
        return perf_counter() - start


@dataclass(frozen=True)
class Timed:
    """Hold what was measured of one function.

    Args:
        seconds: median of one call; 0 where it failed.
        peak: bytes of arguments, results and temporaries of one call, as the compiler reports them.
        first: result of the first call, if it was wanted.
        failed: why there is no time.
        rounds: seconds of one call in each round.
    """

    seconds: float = 0.0
    peak: int = 0
    first: Any = None
    failed: str = ""
    rounds: tuple[float, ...] = ()


def measure(
    functions: Sequence[TimedFunction], budget: float, options: Mapping[str, Any] | None = None
) -> list[Timed]:
    """Return the device time of functions.

    Args:
        functions: what to measure.
        budget: seconds to spend on each, about.
        options: of XLA's compiler.
    """
    return time_all(compile_all(functions, options), budget)


def compile_all(
    functions: Sequence[TimedFunction], options: Mapping[str, Any] | None = None
) -> list[TimedProgram]:
    """Compile several at a time, and those that need a context of their own one at a time."""

    def compile_one(work: TimedFunction) -> TimedProgram:
        log.info("compiling %s", work.name)
        try:
            inputs, f = work.make(), jax.jit(work.f)

            def calls(sets: list[Any]) -> list[Any]:
                return several(f, sets)

            calls.__name__ = _symbol(work.name)
            with (work.around or nullcontext)():
                made = jax.jit(calls, compiler_options=dict(options or {}))
                return TimedProgram(work, made.lower(inputs).compile(), inputs)
        except Exception as failed:  # any, of a compiler or a device
            return TimedProgram(work, failed=first_line(failed))

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        jobs = [None if work.around else pool.submit(compile_one, work) for work in functions]
        pairs = zip(functions, jobs, strict=True)
        return [job.result() if job else compile_one(work) for work, job in pairs]


def time_all(
    programs: Sequence[TimedProgram], budget: float, rounds: int = ROUNDS, by_record: bool = False
) -> list[Timed]:
    """Time compiled programs in turns.

    Args:
        programs: from `compile_all`.
        budget: seconds to spend on each, about.
        rounds: in each of them every program is timed once.
        by_record: by the device's clock (see above), one run in a round.
    """
    warm = []
    for number, program in enumerate(programs, start=1):
        log.info("running %s/%s  %s", number, len(programs), program.work.name)
        warm.append(_warmed(program))
    ran = [(p, t.seconds) for p, t in zip(programs, warm, strict=True) if not t.failed]
    log.info("timing %s of them in turns", len(ran))
    timed = seconds_by_record([p for p, _ in ran], rounds) if by_record else None
    found = iter(timed or _seconds_by_queue(ran, budget, rounds))
    return [t if t.failed else _with_rounds(t, next(found)) for t in warm]


def _warmed(program: TimedProgram) -> Timed:
    if program.failed:
        return Timed(failed=program.failed)
    try:
        first = jax.block_until_ready(program.compiled(program.inputs))[0]
        first = first if program.work.keeps_result else None
        return Timed(program.seconds(1), _peak(program), first)
    except Exception as failed:  # any, of a device
        return Timed(failed=first_line(failed))


def _with_rounds(warm: Timed, rounds: list[float]) -> Timed:
    return replace(warm, seconds=median(rounds), rounds=tuple(rounds))


def _peak(program: TimedProgram) -> int:
    memory = program.compiled.memory_analysis()
    if memory is None:
        return 0
    each = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return each // len(program.inputs) + memory.temp_size_in_bytes


def several(f: Callable[..., Any], sets: list[tuple[Any, ...]]) -> list[Any]:
    """Call one after the other, or the compiler would keep parts of several calls in memory."""
    found: list[Any] = []
    for inputs in sets:
        if found:
            inputs, _ = jax.lax.optimization_barrier((inputs, found[-1]))
        found.append(f(*inputs))
    return found


def _symbol(name: str) -> str:
    return re.sub(r"\W", "_", name)


def first_line(failed: Exception) -> str:
    """Name the kind of an error, and quote the first line of it."""
    first, *_ = str(failed).strip().splitlines() or [""]
    return f"{type(failed).__name__}: {first[:160]}"


# ---- rounds --------------------------------------------------------------------------------------


def in_order(i: int, jobs: list[T]) -> list[T]:
    """Return the order of round i, in which most follow another than in the rounds before.

    First, second, last, third, last but one, ..., then backwards; and so on, begun one further
    every other round. The first after a pause finds a cool chip, and would win by 3% or more; one
    that needs much power leaves low clocks to the next.
    """
    n = len(jobs)
    order = [((j + 1) // 2 if j % 2 else -(j // 2)) + i // 2 for j in range(n)]
    return [jobs[j % n] for j in (reversed(order) if i % 2 else order)]


def rounds_and_calls(seconds: float, budget: float, rounds: int = ROUNDS) -> tuple[int, int]:
    """Return how many rounds a program of so many seconds is timed, and its runs in each."""
    rounds = rounds if seconds < LONG else ROUNDS_OF_LONG
    most = MOST_CALLS if jax.device_count() == 1 else ON_SEVERAL
    return rounds, max(1, min(most, int(budget / rounds / seconds)))


def _seconds_by_queue(
    ran: Sequence[tuple[TimedProgram, float]], budget: float, rounds: int
) -> list[list[float]]:
    """Return the seconds of one call of each program, once a round; long ones skip the last."""
    times: list[list[float]] = [[] for _ in ran]
    turns = [
        (program, rounds_and_calls(seconds, budget, rounds), its)
        for (program, seconds), its in zip(ran, times, strict=True)
    ]
    for i in range(rounds):
        for program, (its_rounds, calls), found in in_order(i, turns):
            if i < its_rounds:
                found.append(program.seconds(calls) / calls / len(program.inputs))
    return times


# ---- by the device's record ----------------------------------------------------------------------

# Passes over 256 MiB of float32, more than any cache holds: 0.06 ms each on an H200.
PASSES, ENTRIES = 12, 1 << 26
# Seconds that a device waits between two kernels of a program if the host was late: more passes are
# queued before the program then, up to so many times.
LATE, MOST_COVERS = 1e-5, 6


def record_options() -> dict[str, Any]:
    """Return the compiler's options for programs that are timed by record."""
    if jax.default_backend() != "gpu":
        return {}
    # XLA chooses by time as ever, without a check of what each candidate gives, which takes
    # minutes. Kernels are launched one by one: a record names a CUDA graph alone, not its kernels.
    return {"xla_gpu_autotune_level": 2, "xla_gpu_enable_command_buffer": ""}


def calls_of(micros: float) -> int:
    """Return how many calls of about so many microseconds one program makes."""
    if jax.default_backend() == "cpu" or micros >= 1000:
        return 1
    return 2 if micros >= 100 else 4


@jax.jit
def passes_over(x: Float[Array, " entries"]) -> Float[Array, ""]:
    """Read memory, pass after pass: each needs what the one before it found, to the last entry."""
    left = jnp.zeros((), x.dtype)
    for _ in range(PASSES):
        left = jnp.max(jnp.abs(x - left))
    return left


def seconds_by_record(programs: Sequence[TimedProgram], rounds: int) -> list[list[float]]:
    """Return the seconds of one call of each program, once a round; all have run before."""
    in_turn = [one for i in range(rounds) for one in in_order(i, list(programs))]
    names = [program.record for program in in_turn]
    memory = jnp.linspace(0.0, 1.0, ENTRIES, dtype=jnp.float32)
    jax.block_until_ready(passes_over(memory))

    def runs_behind(passes: int) -> list[Run]:
        def run() -> None:
            for program in in_turn:
                left = [passes_over(memory) for _ in range(passes)]
                jax.block_until_ready((left, program.compiled(program.inputs)))

        return list(runs_of(recorded(run), set(names)))

    runs: list[Run] = []
    for cover in range(1, 2 if jax.default_backend() == "cpu" else MOST_COVERS + 1):
        runs = runs_behind(cover)
        if [run.name for run in runs] != names:
            log.warning("the device's record does not show what ran: times are the host's")
            runs = [Run(one.record, one.seconds(1), 0.0) for one in in_turn]
        if max((run.waits for run in runs), default=0.0) <= LATE:
            break
    found: dict[str, list[float]] = {program.record: [] for program in programs}
    for run, program in zip(runs, in_turn, strict=True):
        found[run.name].append(run.seconds / len(program.inputs))
    return list(found.values())


class Run(NamedTuple):
    """Hold one run of a program: its seconds, and the longest time in which nothing ran."""

    name: str
    seconds: float
    waits: float


def runs_of(events: Sequence[Event], names: set[str]) -> Iterator[Run]:
    """Yield each run of the named programs; another program lies between two runs of one.

    An event that the record gives to no program belongs to the one before it: a kernel that a
    library launches by itself.
    """
    runs: list[tuple[str, list[Event]]] = []
    for event in sorted(events, key=lambda event: event.start):
        if not runs or event.program not in ("", runs[-1][0]):
            runs.append((event.program, []))
        runs[-1][1].append(event)
    for name, run in runs:
        if name in names:
            ends = list(accumulate((event.end for event in run), max))
            starts = [event.start for event in run[1:]]
            waits = max((b - a for b, a in zip(starts, ends, strict=False)), default=0.0)
            yield Run(name, (ends[-1] - run[0].start) / 1e9, max(0.0, waits) / 1e9)


DEVICE = re.compile(r"/device:(GPU|TPU):\d+$")
KERNELS = ("Stream", "XLA Ops")  # the lines of a GPU's kernels, and of a TPU's


class Event(NamedTuple):
    """Hold one call of one kernel: its program, "" if the record names none, and ns of its ends."""

    program: str
    start: float
    end: float


def recorded(run: Callable[[], Any]) -> list[Event]:
    """Return all that the first device runs meanwhile, without Python's calls, which take time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        return list(events_of(jax.profiler.ProfileData.from_file(str(newest))))


def events_of(record: Any) -> Iterator[Event]:
    """Yield what the first device ran; on a CPU, every operation."""
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if DEVICE.match(name)), None)
    lines = [line for plane in ([device] if device else planes.values()) for line in plane.lines]
    kept = [line for line in lines if device is None or line.name.startswith(KERNELS)]
    for event in (event for line in kept for event in line.events):
        stats = dict(event.stats)
        if device or stats.get("hlo_op"):  # a CPU's lines hold Python's calls too
            program = str(stats.get("hlo_module") or "").partition("(")[0]
            yield Event(program, event.start_ns, event.start_ns + event.duration_ns)
