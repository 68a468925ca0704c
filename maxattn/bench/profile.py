"""Device time by kernel, as jax's profiler records it."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


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
    """Record one run. On a CPU the kernels are XLA's operations."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        records = [jax.profiler.ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    found: dict[str, list[float]] = defaultdict(list)
    events = [event for record in records for event in _events(record)]
    for event in events:
        found[event.name].append(event.duration_ns)
    times = [KernelTime(name, sum(each) / 1e6, len(each)) for name, each in found.items()]
    return Profile(tuple(sorted(times, key=lambda time: -time.ms)), *_overlap(events))


def _overlap(events: list[Any]) -> tuple[float, float, float, float]:
    """Return ms of (span, transfers, transfers alone, idle)."""
    moves = [(e.start_ns, e.start_ns + e.duration_ns) for e in events if "nccl" in e.name.lower()]
    kernels = [(e.start_ns, e.start_ns + e.duration_ns) for e in events if "nccl" not in e.name.lower()]
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


def _events(record: Any) -> Iterator[Any]:
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if name.startswith("/device:")), None)
    if device is not None:
        yield from (event for line in device.lines if line.name.startswith("Stream") for event in line.events)
        return
    for plane in planes.values():
        for line in plane.lines:
            yield from (event for event in line.events if any(key == "hlo_op" for key, _ in event.stats))
