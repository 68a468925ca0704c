"""A process that compiles calls of a grid beside others, and then times them alone.

Tracing and compiling take the host's time, and of some kernels seconds of Python. Timing needs the
device alone, and the host too: what is compiled beside it makes times longer, by a third of short
ones. So many processes compile first; when all have done, or the time for it is up, each times what
it compiled, one process at a time, by a lock on a file. Rows are written when they are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep, time

from maxattn.target import Target
from maxattn.tools.bench.grid.call_timing import CompiledCall
from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.grid.job import GridJob, is_claimed
from maxattn.tools.bench.timing import first_line

LONGEST = 40.0  # seconds that others wait for one that still compiles


def main(path: str, number: str) -> None:
    """Compile calls until none is left, or the time is up; then time them."""
    job, target = GridJob.read(Path(path)), Target.here()
    ready = list(_all_compiled(job, int(number), target))
    _wait_for_all(job, number)
    with (job.folder / f"rows-{number}.jsonl").open("a") as file:
        for each in ready:
            row = each.timed(job)
            print(json.dumps(row.to_json() | {"device": target.device_kind}), file=file, flush=True)
            print(f"{number}: {row.call.name}  {row.summary}", flush=True)
            if not row.forward:  # a device error stays with its process: another would fail alike
                return


def _all_compiled(job: GridJob, number: int, target: Target) -> Iterator[CompiledCall]:
    """Yield calls, compiled, until the time is up."""
    for at in _mine_first(job.calls, number, job.workers):
        if time() > job.until:
            return
        if not is_claimed(job.folder / f"claim-{at}"):
            continue
        try:
            yield CompiledCall.of(job, at, target)
        except Exception as failed:  # any, of a compiler
            print(f"{number}: {job.calls[at].name} failed: {first_line(failed)}", flush=True)


def _wait_for_all(job: GridJob, number: str) -> None:
    """Wait until no process compiles, and no longer than a compilation may last."""
    (job.folder / f"ready-{number}").touch()
    while len(list(job.folder.glob("ready-*"))) < job.workers and time() < job.until + LONGEST:
        sleep(0.1)


def _mine_first(calls: tuple[GridCall, ...], number: int, workers: int) -> Iterator[int]:
    """Yield every call, first those of this process: one compiles a head dim's kernels for all."""
    order = sorted(range(len(calls)), key=lambda i: (calls[i].dtype, calls[i].sizes[5], i))
    start = number * len(order) // workers
    mine = sorted(order[start : (number + 1) * len(order) // workers])
    yield from mine
    yield from (i for i in range(len(calls)) if i not in mine)


if __name__ == "__main__":
    main(*sys.argv[1:])
