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


def device_time(run: Callable[[], Any]) -> list[KernelTime]:
    """Return the kernels of one run, the longest first; transfers between devices are among them.

    On a CPU these are XLA's operations.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        records = [jax.profiler.ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")]
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for event in _events(record):
            found[event.name].append(event.duration_ns)
    times = [KernelTime(name, sum(each) / 1e6, len(each)) for name, each in found.items()]
    return sorted(times, key=lambda time: -time.ms)


def _events(record: Any) -> Iterator[Any]:
    planes = {plane.name: plane for plane in record.planes}
    device = next((plane for name, plane in sorted(planes.items()) if name.startswith("/device:")), None)
    if device is not None:
        yield from (event for line in device.lines if line.name.startswith("Stream") for event in line.events)
        return
    for plane in planes.values():
        for line in plane.lines:
            yield from (event for event in line.events if any(key == "hlo_op" for key, _ in event.stats))
