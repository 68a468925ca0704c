"""What the processes of a grid share: their job, and files by which they take turns."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from maxattn.tools.bench.grid.calls import FULL, GridCall

LOCK, HOLDER = "lock", "holder"  # of the device, and of the process that holds it


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


def is_claimed(path: Path) -> bool:
    """Claim what a file stands for; tell whether no other process has."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@contextmanager
def device_held(folder: Path) -> Iterator[None]:
    """Wait until no other process uses the device, and keep it meanwhile."""
    with (folder / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / HOLDER).write_text(str(os.getpid()))
        yield
        (folder / HOLDER).unlink()
