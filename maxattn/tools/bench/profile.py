"""Device time by kernel of the first device, from jax's profiler; on a CPU by operation."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

DEVICE = re.compile(r"/device:(GPU|TPU):\d+$")
KERNELS = ("Stream", "XLA Ops")  # the lines of a GPU's kernels, and of a TPU's


class Event(NamedTuple):
    """Hold one call of one kernel.

    Args:
        name: as the device ran it.
        op: the program's operation that it was compiled from.
        start, end: in ns.
        program: that the operation is of; "" where the record does not say.
    """

    name: str
    op: str
    start: float
    end: float
    program: str = ""


@dataclass(frozen=True)
class KernelTime:
    """Hold what one kernel took on the first device.

    Args:
        name: as the device ran it.
        ms: of all its calls together.
        calls: how many there were.
    """

    name: str
    ms: float
    calls: float


@dataclass(frozen=True)
class Profile:
    """Hold the first device's share of one run.

    Args:
        kernels: the longest first; transfers between devices are among them.
        span: ms from the first start to the last end.
        transfers: ms of transfers between devices.
        alone: ms of them beside which nothing was computed.
        idle: ms in which neither was done.
    """

    kernels: tuple[KernelTime, ...] = ()
    span: float = 0.0
    transfers: float = 0.0
    alone: float = 0.0
    idle: float = 0.0


def device_time(run: Callable[[], Any]) -> Profile:
    """Record one run."""
    events = recorded(run)
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event.name].append(event.end - event.start)
    times = [KernelTime(name, sum(each) / 1e6, len(each)) for name, each in found.items()]
    return Profile(tuple(sorted(times, key=lambda time: -time.ms)), *overlap(events))


def recorded(run: Callable[[], Any]) -> list[Event]:
    """Return all that the first device runs meanwhile, without Python's calls, which take time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return events_of(folder)


def events_of(folder: str | Path) -> list[Event]:
    """Read the newest record: all that the first device ran.

    Args:
        folder: that `jax.profiler.start_trace` was given.
    """
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return list(events_of_record(jax.profiler.ProfileData.from_file(str(newest))))


def overlap(events: list[Event]) -> tuple[float, float, float, float]:
    """Return ms of (span, transfers, transfers alone, idle)."""
    moves = [(e.start, e.end) for e in events if "nccl" in e.name.lower()]
    kernels = [(e.start, e.end) for e in events if "nccl" not in e.name.lower()]
    every = moves + kernels
    if not every:
        return 0.0, 0.0, 0.0, 0.0
    span = max(end for _, end in every) - min(start for start, _ in every)
    moved, computed, both = _covered(moves), _covered(kernels), _covered(every)
    return span / 1e6, moved / 1e6, (both - computed) / 1e6, (span - both) / 1e6


def _covered(spans: list[tuple[float, float]]) -> float:
    """Measure the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def events_of_record(record: Any) -> Iterator[Event]:
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if DEVICE.match(name)), None)
    lines = [line for plane in ([device] if device else planes.values()) for line in plane.lines]
    kept = [line for line in lines if device is None or line.name.startswith(KERNELS)]
    for event in (event for line in kept for event in line.events):
        stats = dict(event.stats)
        op, program = stats.get("hlo_op"), str(stats.get("hlo_module") or "")
        if device or op:  # a CPU's lines hold Python's calls too
            end = event.start_ns + event.duration_ns
            yield Event(
                event.name, str(op or event.name), event.start_ns, end, program.partition("(")[0]
            )
