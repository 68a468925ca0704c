"""Make the table of estimates that ships with maxattn, from a log of schedules:

    python -m maxattn.tools.tune.ship LOG TABLE

Or compile again each kernel of a log if its sources or libraries have changed:

    python -m maxattn.tools.tune.ship LOG --again [SECONDS]

Each answer is added to the log at once, so a stopped command continues when it is run again.
SECONDS limits each compile; default 600.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, StepCost, Tile
from maxattn.block_sizes.estimated.table import group_name, table_text
from maxattn.errors import InputError
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedules import (
    ScheduleCompiler,
    ScheduleLog,
    costs_of,
    jobs_of,
    read_lines,
)
from maxattn.tools.writable import write_whole

_LIBTPU = re.compile(r"libtpu ([\w.]+)")


def table_of_log(path: Path) -> str:
    """Return a log's costs as the text of a table; the last line of each kernel counts."""
    lines = list(read_lines(path))
    found = {v for line in lines for v in _LIBTPU.findall(str(line["versions"]))}
    if len(found) != 1:
        rule = f"it must have lines of one libtpu, and it has {', '.join(sorted(found)) or 'none'}"
        raise InputError("log", path, rule, "keep only the lines of one version")
    groups: dict[str, dict[tuple[Kind, Evaluates], dict[Tile, StepCost]]] = {}
    for job, answer in jobs_of(lines):
        name = group_name(job.device_kind, job.kernel, job.head_dim, job.dtype)
        for kind, cost in costs_of(job.kind, answer).items():
            groups.setdefault(name, {}).setdefault((kind, job.masked), {})[job.tile] = cost
    return table_text(found.pop(), groups)  # type: ignore[arg-type]


def changed(path: Path, log: ScheduleLog) -> Iterator[KernelJob]:
    """Yield each kernel of a file that the current sources and libraries have not compiled."""
    for job in dict.fromkeys(job for job, _ in jobs_of(read_lines(path))):
        if log.find(job) is None:
            yield job


def compile_again(path: Path, seconds: float) -> None:
    """Compile each kernel whose sources or libraries have changed."""
    with ScheduleCompiler(seconds) as compiler:
        log = ScheduleLog(path, compiler.versions)
        jobs = list(changed(path, log))
        for n, job in enumerate(jobs, 1):
            answer = compiler.answer(job)
            log.add(job, answer)
            what = f"{job.device_kind} {job.kernel} {job.kind} {job.tile}"
            print(f"{n} of {len(jobs)}: {what}: {answer.get('failed', 'known')}")


def main() -> None:
    """Write the table, or compile changed kernels again."""
    parser = argparse.ArgumentParser("python -m maxattn.tools.tune.ship", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("table", type=Path, nargs="?")
    parser.add_argument("--again", type=float, nargs="?", const=600.0, metavar="SECONDS")
    args = parser.parse_args()
    if args.again:
        compile_again(args.log, args.again)
    if args.table:
        write_whole(args.table, table_of_log(args.log))


if __name__ == "__main__":
    main()
