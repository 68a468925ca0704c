"""Compile again each kernel of a log of schedules whose sources or libraries have changed:

python -m maxattn.tools.tune.again LOG [SECONDS]

A new line is added for each as soon as it is known, and a command that is stopped goes on where it
was. SECONDS limits a compile; default 600. `python -m maxattn.tools.tune.ship` makes the table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedule_compiler import ScheduleCompiler
from maxattn.tools.tune.schedule_log import ScheduleLog, jobs_of, read_lines

SECONDS = 600.0


def changed(path: Path, log: ScheduleLog) -> Iterator[KernelJob]:
    """Yield the kernels of a file that a log does not know as they are today, each once."""
    for job in dict.fromkeys(job for job, _ in jobs_of(read_lines(path))):
        if log.find(job) is None:
            yield job


def main() -> None:
    """Compile what has changed."""
    path, seconds = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else SECONDS
    with ScheduleCompiler(seconds) as compiler:
        log = ScheduleLog(path, compiler.versions)
        jobs = list(changed(path, log))
        for n, job in enumerate(jobs, 1):
            answer = compiler.answer(job)
            log.add(job, answer)
            what = f"{job.device_kind} {job.kernel} {job.kind} {job.tile}"
            print(f"{n} of {len(jobs)}: {what}: {answer.get('failed', 'known')}")


if __name__ == "__main__":
    main()
