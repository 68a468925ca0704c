"""Reads the record of jax's profiler: every operation that the first device ran.

On a CPU these are XLA's operations; on a GPU and a TPU they are kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

DEVICE = re.compile(r"/device:(GPU|TPU):\d+$")
KERNELS = ("Stream", "XLA Ops")  # the lines of a GPU's kernels, and of a TPU's


class Event(NamedTuple):
    """One call of one kernel.

    Args:
        name: as the device ran it.
        op: the program's operation that it was compiled from.
        start, end: in ns.
    """

    name: str
    op: str
    start: float
    end: float


def events_of(folder: str | Path) -> Iterator[Event]:
    """Read the newest record of a folder that `jax.profiler.start_trace` was given."""
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    record: Any = jax.profiler.ProfileData.from_file(str(newest))
    planes = {plane.name: plane for plane in record.planes}
    devices = [plane for name, plane in sorted(planes.items()) if DEVICE.match(name)]
    for plane in devices[:1] or planes.values():
        yield from _events(plane, on_device=bool(devices))


def idle_ns(events: Iterable[Event]) -> float:
    """Return how long a device ran nothing, from the first kernel's start to the last one's end."""
    idle, done = 0.0, None
    for event in sorted(events, key=lambda e: e.start):
        idle += 0.0 if done is None else max(0.0, event.start - done)
        done = event.end if done is None else max(done, event.end)
    return idle


def _events(plane: Any, on_device: bool) -> Iterator[Event]:
    lines = (line for line in plane.lines if not on_device or line.name.startswith(KERNELS))
    for event in (event for line in lines for event in line.events):
        op = dict(event.stats).get("hlo_op")
        if on_device or op:  # a CPU's lines hold Python's calls too
            end = event.start_ns + event.duration_ns
            yield Event(event.name, str(op or event.name), event.start_ns, end)
