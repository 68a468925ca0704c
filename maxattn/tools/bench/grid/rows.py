"""What was measured of one call of a grid, and the files that hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from maxattn.kernels import KERNELS
from maxattn.kernels.auto.cost_terms import FEW_SCORES, PLAIN
from maxattn.target import Target
from maxattn.tools.bench.grid.calls import GridCall, of_shape
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD
from maxattn.tools.model_shapes import read

GridTime = dict[str, float]
"""Milliseconds by kernel."""


@dataclass(frozen=True)
class GridRow:
    """Hold what was measured of one call.

    Args:
        call: of the grid.
        times: milliseconds by pass and kernel; of libraries called bare the forward, and forward
            and backward together.
        failed: why a kernel that took the call did not run, by kernel.
        spent: seconds to compile, and on the device.
        device: that ran it, as jax calls it; "" where that is not written.
    """

    call: GridCall
    times: dict[str, GridTime]
    failed: dict[str, str] = field(default_factory=dict)
    spent: tuple[float, float] = (0.0, 0.0)
    device: str = ""

    @property
    def forward(self) -> GridTime:
        """Milliseconds of the forward."""
        return self.times[FORWARD]

    @property
    def backward(self) -> GridTime:
        """Milliseconds of the backward."""
        return self.times[BACKWARD]

    @property
    def summary(self) -> str:
        """Say what it found, in a line."""
        text = "; ".join(
            f"{what} " + " ".join(f"{name} {ms:.4g}" for name, ms in times.items())
            for what, times in self.times.items()
        )
        failed = "".join(f"; {name} failed: {why}" for name, why in self.failed.items())
        compiled, timed = self.spent
        return f"{text}{failed} ({compiled:.1f} s compiled, {timed:.1f} s timed)"

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it."""
        row: dict[str, Any] = {"call": self.call.to_json(), **self.times}
        return row | ({"failed": self.failed} if self.failed else {})

    @staticmethod
    def of_json(row: dict[str, Any], device: str = "") -> GridRow:
        """Read it back; `device` is that of its file, where the row says none."""
        times = {what: row[what] for what in (FORWARD, BACKWARD, BOTH) if what in row}
        device = row.get("device", device)
        return GridRow(GridCall.of_json(row["call"]), times, row.get("failed", {}), device=device)


def is_measured(name: str, call: GridCall) -> bool:
    """Tell whether a kernel's time is worth the measurement.

    Plain JAX is fastest on few scores alone, and then in one piece.
    """
    return name not in PLAIN or (name == "dot_product" and call.pairs <= FEW_SCORES)


def is_ours(name: str) -> bool:
    """Tell a kernel from another library, and from what is made of kernels."""
    return name in KERNELS


def read_rows(files: Iterable[Path]) -> list[GridRow]:
    """Read rows of files, one a call and device: of a grid, a line of .jsonl each, or what `bench
    --json` wrote.

    Of a call that stands in one file more than once, each kernel gets the median of its times; of
    one that stands in several files, the time of the last: it was measured again. A time of null
    takes back one before, of a kernel that is launched otherwise since. Both are of one device: the
    times of another stay.
    """
    found: dict[tuple[GridCall, str], GridRow] = {}
    for _, rows in _by_file(files):
        for row in merged(rows):
            key = row.call, row.device
            found[key] = _again(found[key], row) if key in found else row
    return [_without_null(row) for row in found.values()]


def files_by_device(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the files of each kind of device, in their order."""
    found: dict[str, list[Path]] = {}
    for path, rows in _by_file(files):
        for device in dict.fromkeys(row.device for row in rows):
            found.setdefault(device, []).append(path)
    return found


def any_nameless(files: Iterable[Path]) -> bool:
    """Tell whether a row does not say on which device it was measured."""
    return any(not row.device for path in files for row in _rows_of(path))


def _by_file(files: Iterable[Path]) -> list[tuple[Path, list[GridRow]]]:
    """Read each file; a row that names no device is of the first that one names."""
    read_ones = [(path, _rows_of(path)) for path in files]
    named = (row.device for _, rows in read_ones for row in rows if row.device)
    first = next(named, "")
    return [
        (path, [replace(row, device=row.device or first) for row in rows])
        for path, rows in read_ones
    ]


def _rows_of(path: Path) -> list[GridRow]:
    if path.suffix == ".jsonl":
        return [GridRow.of_json(json.loads(line)) for line in whole_lines(path)]
    return [row for run in _runs(json.loads(path.read_text())) for row in _of_run(run)]


def whole_lines(path: Path) -> list[str]:
    """Read the rows of a file that another process writes: half a one at its end is none."""
    *lines, last = ["", *path.read_text().splitlines()]
    try:
        json.loads(last)
    except ValueError:
        return lines[1:]
    return [*lines[1:], last]


def _again(before: GridRow, row: GridRow) -> GridRow:
    """Return a row with the times of a later one in the place of its own."""
    passes = dict.fromkeys((*before.times, *row.times))
    times = {what: before.times.get(what, {}) | row.times.get(what, {}) for what in passes}
    return replace(before, times=times)


def _without_null(row: GridRow) -> GridRow:
    times = {
        what: {who: ms for who, ms in its.items() if ms is not None}
        for what, its in row.times.items()
    }
    return replace(row, times=times)


def target_of(files: Iterable[Path]) -> Target | None:
    """Return the machine that rows were measured on: that of the first file that says it."""
    whole = (path for path in files if path.suffix != ".jsonl")
    runs = [run for path in whole for run in _runs(json.loads(path.read_text()))]
    machine = next((run["machine"] for run in runs if "machine" in run), None)
    if machine is None:
        return None
    packages = machine.get("packages", {k: v for k, v in machine.items() if k != "device"})
    return Target("gpu", machine["device"], tuple(packages.items()))


def _runs(document: Any) -> list[dict[str, Any]]:
    """List the runs of a file: it is one, or holds several by name."""
    of = document if isinstance(document, dict) else {}
    inside = [run for run in of.values() if isinstance(run, dict) and "rows" in run]
    return [of] if "rows" in of else inside


def _of_run(run: dict[str, Any]) -> list[GridRow]:
    """Read the rows of a grid, and those of shapes as `bench` measures them."""
    device = run.get("machine", {}).get("device", "")
    rows = [GridRow.of_json(row, device) for row in run["rows"] if "call" in row]
    for row in run["rows"]:
        if row.get("what") in (FORWARD, BACKWARD) and is_ours(row["who"]) and row["ms"]:
            times: dict[str, GridTime] = {FORWARD: {}, BACKWARD: {}}
            times[row["what"]][row["who"]] = row["ms"]
            rows.append(GridRow(of_shape(read(row["shape"])), times, device=device))
    return rows


def merged(rows: Iterable[GridRow]) -> list[GridRow]:
    """Return one row a call and device: the median of each kernel's times."""
    found: dict[tuple[GridCall, str], list[GridRow]] = {}
    for row in rows:
        found.setdefault((row.call, row.device), []).append(row)
    return [its[0] if len(its) == 1 else _median_of(its) for its in found.values()]


def _median_of(rows: list[GridRow]) -> GridRow:
    times: dict[str, dict[str, list[float]]] = {FORWARD: {}, BACKWARD: {}}
    for row in rows:
        for what, its in row.times.items():
            for who, ms in its.items():
                times.setdefault(what, {}).setdefault(who, []).append(ms)
    middle = {what: {who: median(ms) for who, ms in its.items()} for what, its in times.items()}
    return replace(rows[0], times=middle)


def to_file(rows: Iterable[GridRow], machine: dict[str, Any]) -> str:
    """Write rows as a file of docs/measured, a row in a line."""
    lines = ",\n  ".join(json.dumps(row.to_json(), separators=(",", ":")) for row in rows)
    return f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n'
