"""Time functions on the device, without the host's launch time.

All functions are compiled first, several at a time, and then timed in turns. The host queues calls
of a few milliseconds or more without waiting in between, so that the device never idles.

The host takes 5 to 50 microseconds to launch a kernel. A shorter kernel alone would wait for the
host; in a model it would not, since longer kernels run before it. So several short calls, each on
different inputs, are compiled into one program. With `by_record` their times are read from the
device's profile, and reads of a large array are queued before each program, so that the host runs
ahead. These reads need little power, so they do not change clocks.
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

# The command line prints this log, since a measurement can take minutes.
log = logging.getLogger("maxattn.measuring")
T = TypeVar("T")
ROUNDS = 5
LONG, ROUNDS_OF_LONG = 0.1, 3  # seconds of a call that is long enough for fewer rounds
# Most calls queued at a time, on one device and on several: XLA on CPUs hangs if many programs with
# collectives are queued.
MOST_CALLS, ON_SEVERAL = 400, 20


@dataclass(frozen=True)
class TimedFunction:
    """A function to measure."""

    f: Callable[..., Any]  # function of arrays
    # returns a list of f's argument tuples, of equal shapes, as arrays or specs
    make: Callable[[], list[tuple[Any, ...]]]
    # a context to trace and compile f in; functions with one are compiled one at a time
    around: Callable[[], AbstractContextManager[Any]] | None = None
    name: str = "work"  # for progress and profiles; unique among functions that are timed together
    keeps_result: bool = False  # whether `Timed.first` is filled


@dataclass(frozen=True)
class TimedProgram:
    """A compiled program that calls a function on each set of inputs, or why compiling failed."""

    work: TimedFunction
    compiled: Any = None
    inputs: Sequence[Any] = ()
    failed: str = ""

    @property
    def record(self) -> str:
        """The name of the program in a device's profile."""
        return f"jit_{_symbol(self.work.name)}"

    def seconds(self, calls: int) -> float:
        """Run the program `calls` times in a row; return the total seconds."""
        start, out = perf_counter(), None
        for _ in range(calls):
            out = self.compiled(self.inputs)
        jax.block_until_ready(out)
        return perf_counter() - start


@dataclass(frozen=True)
class Timed:
    """Times, memory and result of one function."""

    seconds: float = 0.0  # median time of one call; 0 if it failed
    # bytes of arguments, results and temporaries of one call, as the compiler reports them
    peak: int = 0
    first: Any = None  # result of the first call, if `keeps_result`
    failed: str = ""  # why the time is missing, or ""
    rounds: tuple[float, ...] = ()  # seconds of one call in each round


def measure(
    functions: Sequence[TimedFunction], budget: float, options: Mapping[str, Any] | None = None
) -> list[Timed]:
    """Return the device time of functions; `budget` is about the seconds spent on each."""
    return time_all(compile_all(functions, options), budget)


def compile_all(
    functions: Sequence[TimedFunction], options: Mapping[str, Any] | None = None
) -> list[TimedProgram]:
    """Compile functions in parallel; functions with a context are compiled one at a time."""

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
        except Exception as failed:  # any error of a compiler or a device
            return TimedProgram(work, failed=first_line(failed))

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        jobs = [None if work.around else pool.submit(compile_one, work) for work in functions]
        pairs = zip(functions, jobs, strict=True)
        return [job.result() if job else compile_one(work) for work, job in pairs]


def time_all(
    programs: Sequence[TimedProgram], budget: float, rounds: int = ROUNDS, by_record: bool = False
) -> list[Timed]:
    """Time compiled programs in turns, `rounds` times each, about `budget` seconds on each.

    If `by_record`, times are read from the device's profile (see the module), one run in each
    round.
    """
    warm = []
    for number, program in enumerate(programs, start=1):
        log.info("running %s/%s  %s", number, len(programs), program.work.name)
        warm.append(_warmed(program))
    ran = [(p, t.seconds) for p, t in zip(programs, warm, strict=True) if not t.failed]
    log.info("timing %s programs in turns", len(ran))
    timed = seconds_by_record([p for p, _ in ran], rounds) if by_record else None
    found = iter(timed or _seconds_by_queue(ran, budget, rounds))
    each = [() if t.failed else tuple(next(found)) for t in warm]
    pairs = zip(warm, each, strict=True)
    return [replace(t, seconds=median(x), rounds=x) if x else t for t, x in pairs]


def _warmed(program: TimedProgram) -> Timed:
    if program.failed:
        return Timed(failed=program.failed)
    try:
        first = jax.block_until_ready(program.compiled(program.inputs))[0]
        first = first if program.work.keeps_result else None
        return Timed(program.seconds(1), _peak(program), first)
    except Exception as failed:  # any error of a device
        return Timed(failed=first_line(failed))


def _peak(program: TimedProgram) -> int:
    memory = program.compiled.memory_analysis()
    if memory is None:
        return 0
    each = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return each // len(program.inputs) + memory.temp_size_in_bytes


def several(f: Callable[..., Any], sets: list[tuple[Any, ...]]) -> list[Any]:
    """Call f on each set in sequence, so that XLA does not keep parts of several calls at once."""
    found: list[Any] = []
    for inputs in sets:
        if found:
            inputs, _ = jax.lax.optimization_barrier((inputs, found[-1]))
        found.append(f(*inputs))
    return found


def _symbol(name: str) -> str:
    return re.sub(r"\W", "_", name)


def first_line(failed: Exception) -> str:
    """Return the type and the first line of an error."""
    first, *_ = str(failed).strip().splitlines() or [""]
    return f"{type(failed).__name__}: {first[:160]}"


# ---- rounds --------------------------------------------------------------------------------------


def in_order(i: int, jobs: list[T]) -> list[T]:
    """Return the jobs in the order of round i; the neighbours of a job differ between rounds.

    An even round runs the first, second, last, third, last but one, ... job, and the next round the
    reverse; every two rounds the start moves by one job. In a fixed order, the job after a pause
    would gain 3% or more from a cool chip, and the job after a power-hungry one would lose clocks.
    """
    n = len(jobs)
    order = [((j + 1) // 2 if j % 2 else -(j // 2)) + i // 2 for j in range(n)]
    return [jobs[j % n] for j in (reversed(order) if i % 2 else order)]


def rounds_and_calls(seconds: float, budget: float, rounds: int = ROUNDS) -> tuple[int, int]:
    """Return the number of rounds for a program that takes `seconds`, and of runs in a round."""
    rounds = rounds if seconds < LONG else ROUNDS_OF_LONG
    most = MOST_CALLS if jax.device_count() == 1 else ON_SEVERAL
    return rounds, max(1, min(most, int(budget / rounds / seconds)))


def _seconds_by_queue(
    ran: Sequence[tuple[TimedProgram, float]], budget: float, rounds: int
) -> list[list[float]]:
    """Return each program's seconds per call in each round; long programs have fewer rounds."""
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


# ---- by the device's profile ---------------------------------------------------------------------

# Reads of 256 MiB of float32, more than any cache holds: 0.06 ms each on an H200.
PASSES, ENTRIES = 12, 1 << 26
# If the device idles longer than LATE seconds between two kernels of a program, the host was late:
# the runs are repeated with more memory reads before each, at most MOST_COVERS times PASSES.
LATE, MOST_COVERS = 1e-5, 6


def record_options() -> dict[str, Any]:
    """Return the compiler's options for programs whose times are read from a profile."""
    if jax.default_backend() != "gpu":
        return {}
    # Level 2 autotunes without checking each candidate's results, which would take minutes. CUDA
    # graphs are off, since a profile would show a graph instead of its kernels.
    return {"xla_gpu_autotune_level": 2, "xla_gpu_enable_command_buffer": ""}


def calls_of(micros: float) -> int:
    """Return how many calls of about `micros` microseconds to put in one program."""
    if jax.default_backend() == "cpu" or micros >= 1000:
        return 1
    return 2 if micros >= 100 else 4


@jax.jit
def passes_over(x: Float[Array, " entries"]) -> Float[Array, ""]:
    """Read x PASSES times; each read depends on the result of the read before."""
    left = jnp.zeros((), x.dtype)
    for _ in range(PASSES):
        left = jnp.max(jnp.abs(x - left))
    return left


def seconds_by_record(programs: Sequence[TimedProgram], rounds: int) -> list[list[float]]:
    """Return each program's seconds per call in each round; every program must have run once."""
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
            log.warning("the device's profile lacks some runs, so the host measures the times")
            runs = [Run(one.record, one.seconds(1), 0.0) for one in in_turn]
        if max((run.waits for run in runs), default=0.0) <= LATE:
            break
    found: dict[str, list[float]] = {program.record: [] for program in programs}
    for run, program in zip(runs, in_turn, strict=True):
        found[run.name].append(run.seconds / len(program.inputs))
    return list(found.values())


class Run(NamedTuple):
    """One run of a program: its seconds, and the longest pause between two kernels."""

    name: str
    seconds: float
    waits: float


def runs_of(events: Sequence[Event], names: set[str]) -> Iterator[Run]:
    """Yield each run of the named programs; a run ends when another program begins.

    An event without a program, such as a kernel that a library launches itself, belongs to the
    program of the event before it.
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
KERNELS = ("Stream", "XLA Ops")  # the profile's lines with a GPU's kernels, and with a TPU's


class Event(NamedTuple):
    """One call of a kernel: its program ("" if unknown), and when it starts and ends in ns."""

    program: str
    start: float
    end: float


def recorded(run: Callable[[], Any]) -> list[Event]:
    """Profile the first device while `run` runs; Python's calls, which cost time, are left out."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        return list(events_of(jax.profiler.ProfileData.from_file(str(newest))))


def events_of(record: Any) -> Iterator[Event]:
    """Yield the kernels that the first device ran; on a CPU, every operation."""
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if DEVICE.match(name)), None)
    lines = [line for plane in ([device] if device else planes.values()) for line in plane.lines]
    kept = [line for line in lines if device is None or line.name.startswith(KERNELS)]
    for event in (event for line in kept for event in line.events):
        stats = dict(event.stats)
        if device or stats.get("hlo_op"):  # a CPU's lines have Python's calls too
            program = str(stats.get("hlo_module") or "").partition("(")[0]
            yield Event(program, event.start_ns, event.start_ns + event.duration_ns)
