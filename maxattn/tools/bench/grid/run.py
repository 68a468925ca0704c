"""Measure a grid with many processes that share one device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import sleep, time

from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.grid.job import HOLDER, GridJob
from maxattn.tools.bench.grid.rows import GridRow, read_rows, whole_lines
from maxattn.tools.held_signals import held_signals

log = logging.getLogger("maxattn.tools.bench")
COMPILING = 0.7  # of the limit: the rest is for timing
PAUSE = 0.5
STUCK = 60.0  # seconds that a process may hold the device


def run_grid(
    calls: Sequence[GridCall],
    seconds: float = 0.05,
    limit: float = 3600.0,
    workers: int = 0,
    folder: Path | None = None,
    kernels: Sequence[str] = (),
    peers: int = 0,
    keep: Callable[[list[GridRow]], None] | None = None,
) -> list[GridRow]:
    """Measure calls: compile in many processes, then time in one at a time.

    Args:
        calls: of the grid; they are begun in this order.
        seconds: for one kernel and pass of a call, about.
        limit: seconds until the processes are ended, with what is measured by then.
        workers: how many processes; 0 for the number of cores.
        folder: where rows are written as they are measured, rows-N.jsonl; default a temporary one.
        kernels: names; default all that can run.
        peers: measure other libraries too, called bare, on every so manieth call of all pairs; 0
            for none.
        keep: gets what is measured so far, whenever that is more: a run may be ended from outside.
    """
    count = workers or max(1, (os.cpu_count() or 2) - 2)
    with nullcontext(str(folder)) if folder else tempfile.TemporaryDirectory() as place:
        here = Path(place)
        here.mkdir(parents=True, exist_ok=True)
        until = time() + COMPILING * limit
        job = GridJob(here, tuple(calls), seconds, count, until, tuple(kernels), peers)
        with _processes(job) as processes:
            _wait(processes, time() + limit, here, len(calls), keep)
        return _rows_in(here)


def _rows_in(folder: Path) -> list[GridRow]:
    return read_rows(sorted(folder.glob("rows-*.jsonl")))


@contextmanager
def _processes(job: GridJob) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes, and end those that are left."""
    path, env = str(job.write()), os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    words = [sys.executable, "-W", "ignore", "-m", "maxattn.tools.bench.grid.worker", path]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with held_signals():
            for i in range(job.workers):
                started.append(subprocess.Popen([*words, str(i)], env=env))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def _wait(
    processes: list[subprocess.Popen[bytes]],
    until: float,
    folder: Path,
    calls: int,
    keep: Callable[[list[GridRow]], None] | None,
) -> None:
    told = kept = 0
    while time() < until and any(process.poll() is None for process in processes):
        sleep(PAUSE)
        _end_stuck(processes, folder / HOLDER)
        done = sum(len(whole_lines(x)) for x in folder.glob("rows-*.jsonl"))
        if keep and done > kept:
            kept = done
            keep(_rows_in(folder))
        if done >= told + 20:
            told = done
            log.info("measured %s of %s calls", done, calls)


def _end_stuck(processes: list[subprocess.Popen[bytes]], holder: Path) -> None:
    """End a process that does not give the device back: a kernel in it never ends."""
    try:
        held, pid = time() - holder.stat().st_mtime, int(holder.read_text() or 0)
    except (FileNotFoundError, ValueError):  # nobody holds it
        return
    for process in processes if held > STUCK else []:
        if process.pid == pid:
            log.info("ending process %s, which held the device for %.0f s", pid, held)
            process.kill()
            holder.unlink(missing_ok=True)
