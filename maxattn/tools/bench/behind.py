"""Time short calls by the device's own clock, queued behind passes over memory.

The host takes 5 to 50 microseconds to launch a kernel. Kernels that are shorter would wait for it,
and a timing would be the host's; in a model they follow longer ones, and do not wait. So a program
of passes over memory is queued before each that is timed. Passes need little power, so that clocks
stay as they are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.tools.bench.profile import Event, recorded
from maxattn.tools.bench.timing import in_order, queue, several

log = logging.getLogger("maxattn.tools.bench")
PASSES = 12  # 0.06 ms each on an H200
ENTRIES = 1 << 26  # float32: 256 MiB, more than any cache holds
# Seconds that a device waits between two kernels of a program where the host was late: more passes
# are queued before the program then, up to so many times.
LATE, MOST_COVERS = 1e-5, 6


@jax.jit
def passes_over(x: Float[Array, " entries"]) -> Float[Array, ""]:
    """Read memory, pass after pass: each needs what the one before it found, to the last entry."""
    left = jnp.zeros((), x.dtype)
    for _ in range(PASSES):
        left = jnp.max(jnp.abs(x - left))
    return left


def calls_of(micros: float) -> int:
    """Return how many calls of so many microseconds, about, one program makes."""
    if jax.default_backend() == "cpu" or micros >= 1000:
        return 1
    return 2 if micros >= 100 else 4


class Behind(NamedTuple):
    """Hold a compiled program of several calls, and its name in a record."""

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
            return several(jax.jit(f), sets)

        work.__name__ = re.sub(r"\W", "_", name)
        # XLA chooses by time as ever, without a check of what each candidate gives: minutes.
        # Kernels are launched one by one: a record names those of a CUDA graph by the graph alone.
        options = {"xla_gpu_autotune_level": 2, "xla_gpu_enable_command_buffer": ""}
        options = options if jax.default_backend() == "gpu" else {}
        return cls(jax.jit(work).lower(list(sets)).compile(options), f"jit_{work.__name__}")

    def __call__(self, sets: Sequence[Any]) -> list[Any]:
        """Return the results of all calls."""
        return self.compiled(list(sets))


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


def seconds_behind(
    programs: Sequence[Behind], sets: Sequence[Any], rounds: int
) -> list[list[float]]:
    """Return the seconds of one call of each program, once a round.

    Args:
        programs: that have run before, each of another name.
        sets: the inputs of their calls.
        rounds: in each of them every program runs once.
    """
    in_turn = [one for at in range(rounds) for one in in_order(at, list(programs))]
    names = [program.name for program in in_turn]
    memory = jnp.linspace(0.0, 1.0, ENTRIES, dtype=jnp.float32)
    jax.block_until_ready(passes_over(memory))
    found: dict[str, list[float]] = {program.name: [] for program in programs}

    def taken(cover: int) -> list[Run]:
        def run() -> None:
            for program in in_turn:
                left = [passes_over(memory) for _ in range(cover)]
                jax.block_until_ready((left, program(sets)))

        return list(runs_of(recorded(run), set(names)))

    for cover in range(1, 2 if jax.default_backend() == "cpu" else MOST_COVERS + 1):
        runs = taken(cover)
        if [run.name for run in runs] != names:
            log.warning("the device's record does not show what ran: times are the host's")
            runs = [Run(one.name, queue(one, sets, 1), 0.0) for one in in_turn]
        if max(run.waits for run in runs) <= LATE:
            break
    for run in runs:
        found[run.name].append(run.seconds / len(sets))
    return [found[program.name] for program in programs]


def runs_of(events: Sequence[Event], names: set[str]) -> Iterator[Run]:
    """Yield each run of a program.

    An event that the record gives to no program is of the one before it: a kernel that a library
    launches by itself. Runs of one program have another program between them.

    Args:
        events: of a record.
        names: of the programs.
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
