"""Make the table of estimates that ships from a log of schedules:

python -m maxattn.tools.tune.ship LOG TABLE
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from maxattn.block_sizes.estimated.step_cost import Evaluates, Kind, StepCost, Tile
from maxattn.block_sizes.estimated.table import group_name, table_text
from maxattn.errors import InputError
from maxattn.tools.tune.schedule_log import costs_of, jobs_of, read_lines
from maxattn.tools.writable import write_whole

_LIBTPU = re.compile(r"libtpu ([\w.]+)")


def table_of_log(path: Path) -> str:
    """Write the costs of a log as a table; a later line of the same kernel counts."""
    lines = list(read_lines(path))
    found = {v for line in lines for v in _LIBTPU.findall(str(line["versions"]))}
    if len(found) != 1:
        rule = f"a table is of one libtpu, and the log has {', '.join(sorted(found)) or 'none'}"
        raise InputError("log", path, rule, "keep the lines of one version")
    groups: dict[str, dict[tuple[Kind, Evaluates], dict[Tile, StepCost]]] = {}
    for job, answer in jobs_of(lines):
        name = group_name(job.device_kind, job.kernel, job.head_dim, job.dtype)
        for kind, cost in costs_of(job.kind, answer).items():
            groups.setdefault(name, {}).setdefault((kind, job.masked), {})[job.tile] = cost
    return table_text(found.pop(), groups)  # type: ignore[arg-type]


def main() -> None:
    """Write the table that is named on the command line."""
    write_whole(Path(sys.argv[2]), table_of_log(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
