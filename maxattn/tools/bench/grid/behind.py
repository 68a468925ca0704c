"""Time short calls by the device's own clock, queued behind passes over memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from math import nan
from statistics import median
from typing import Any, NamedTuple

import jax

from maxattn.tools.bench.grid import busy
from maxattn.tools.bench.profile import Event, recorded
from maxattn.tools.bench.timing import in_order, queue, several

log = logging.getLogger("maxattn.tools.bench")
PASSES = jax.jit(busy.passes_over)
# Seconds that a device waits between two kernels of a program where the host was late: it had
# queued no more, as where other processes compile, and more passes are queued before the program.
LATE = 1e-5
MOST_COVERS = 6  # times the passes


class Behind(NamedTuple):
    """Hold a compiled program of several calls, that is timed behind passes over memory.

    Attributes:
        compiled: the program.
        name: of it, as a record says it.
    """

    compiled: Any
    name: str

    @classmethod
    def of(cls, f: Callable[..., Any], sets: Sequence[Any], name: str) -> Behind:
        """Compile a function.

        Args:
            f: the function.
            sets: its inputs, or their specs: of one call each.
            name: another one for each program that is timed beside it.
        """

        def work(sets: list[Any]) -> list[Any]:
            return several(f, sets)

        work.__name__ = re.sub(r"\W", "_", name)
        lowered = jax.jit(work).lower(list(sets))
        return cls(lowered.compile(busy.compiler_options()), f"jit_{work.__name__}")

    def __call__(self, sets: Sequence[Any]) -> list[Any]:
        """Return the results of all calls."""
        return self.compiled(list(sets))


Jobs = Sequence[tuple[Behind, Sequence[Any]]]
"""Programs, each of another name, and the inputs of their calls."""


class Run(NamedTuple):
    """Hold one run of a program on a device.

    Attributes:
        name: of the program.
        seconds: from its first start to its last end.
        waits: seconds of the longest time in between in which nothing ran.
    """

    name: str
    seconds: float
    waits: float


class NoRecordError(Exception):
    """The record of a device does not show what ran."""


def seconds_behind(jobs: Jobs, rounds: int) -> list[tuple[float, ...]]:
    """Return the seconds of one call of each program, once a round.

    Args:
        jobs: programs that have run before.
        rounds: in each of them every program runs once.
    """
    try:
        found = _by_record(jobs, rounds)
    except NoRecordError as missing:
        log.warning("%s: times are the host's, and of short calls less sure", missing)
        found = _by_host(jobs, rounds)
    return [tuple(x / len(sets) for x in found[program.name]) for program, sets in jobs]


def _by_record(jobs: Jobs, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of programs by the device's clock."""
    in_turn = [jobs[i] for i in _order(len(jobs), rounds)]
    taken = _recorded_runs(in_turn, 1)
    covers = 1 if jax.default_backend() == "cpu" else MOST_COVERS
    for cover in range(2, covers + 1):
        if max(run.waits for run in taken) <= LATE:
            break
        taken = _recorded_runs(in_turn, cover)
    found: dict[str, list[float]] = {}
    for run in taken:
        found.setdefault(run.name, []).append(run.seconds)
    return found


def _recorded_runs(in_turn: Jobs, cover: int) -> list[Run]:
    """Return the runs of programs, each behind so many times the passes."""
    memory, passes = _passes()

    def run() -> None:
        for program, sets in in_turn:
            left = [passes(memory) for _ in range(cover)]
            jax.block_until_ready((left, program(sets)))

    taken = list(runs_of(recorded(run), {program.name for program, _ in in_turn}))
    if [run.name for run in taken] != [program.name for program, _ in in_turn]:
        raise NoRecordError("the device's record does not show the programs that ran")
    return taken


def _passes() -> tuple[busy.Memory, Any]:
    """Return memory and the passes over it, which have run once."""
    memory = busy.memory()
    jax.block_until_ready(PASSES(memory))
    return memory, PASSES


def _by_host(jobs: Jobs, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of programs behind passes, less those of the passes, by the host.

    They are no numbers where the passes alone differ by more from time to time.
    """
    memory, passes = _passes()
    found: dict[str, list[float]] = {program.name: [] for program, _ in jobs}
    offs = [queue(passes, memory, 1) for _ in range(rounds)]
    off, scatter = median(offs), max(offs) - min(offs)
    for program, sets in (jobs[i] for i in _order(len(jobs), rounds)):
        both = queue(lambda x, f=program, sets=sets: (passes(x), f(sets)), memory, 1)
        found[program.name].append(both - off)
    hidden = [name for name, taken in found.items() if median(taken) <= scatter]
    return found | {name: [nan] * rounds for name in hidden}


def _order(count: int, rounds: int) -> list[int]:
    """Return which program runs when."""
    return [i for at in range(rounds) for i in in_order(at, list(range(count)))]


def runs_of(events: Sequence[Event], names: set[str]) -> Iterator[Run]:
    """Yield each run of a program.

    An event that the record gives to no program is of the one before it: a kernel that a library
    launches by itself. Runs of one program have another program between them.

    Args:
        events: of a record.
        names: of the programs.
    """
    run: list[Event] = []
    name = ""
    for event in sorted(events, key=lambda event: event.start):
        if event.program not in ("", name):
            yield from _run(name, run, names)
            name, run = event.program, []
        run.append(event)
    yield from _run(name, run, names)


def _run(name: str, run: list[Event], names: set[str]) -> Iterator[Run]:
    if name in names:
        ends = list(accumulate((event.end for event in run), max))
        starts = [event.start for event in run[1:]]
        waits = max((start - end for start, end in zip(starts, ends, strict=False)), default=0.0)
        yield Run(name, (ends[-1] - run[0].start) / 1e9, max(0.0, waits) / 1e9)
