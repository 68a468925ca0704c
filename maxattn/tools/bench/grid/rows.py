"""What was measured of one call of a grid, and the files that hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from maxattn.kernels import KERNELS
from maxattn.tools.bench.grid.calls import GridCall, of_shape
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD
from maxattn.tools.model_shapes import read

GridTime = dict[str, float]
"""Milliseconds by kernel."""

FEW_SCORES = 2e8  # up to which the plain kernels can win, and are measured
PLAIN = ("dot_product", "memory_efficient")


@dataclass(frozen=True)
class GridRow:
    """Hold what was measured of one call.

    Args:
        call: of the grid.
        times: milliseconds by pass and kernel; of libraries called bare the forward, and forward
            and backward together.
        failed: why a kernel that took the call did not run, by kernel.
        spent: seconds to compile, and on the device.
    """

    call: GridCall
    times: dict[str, GridTime]
    failed: dict[str, str] = field(default_factory=dict)
    spent: tuple[float, float] = (0.0, 0.0)

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
    def of_json(row: dict[str, Any]) -> GridRow:
        """Read it back."""
        times = {what: row[what] for what in (FORWARD, BACKWARD, BOTH) if what in row}
        return GridRow(GridCall.of_json(row["call"]), times, row.get("failed", {}))


def is_measured(name: str, call: GridCall) -> bool:
    """Tell whether a kernel's time is worth the measurement: plain JAX on few scores alone."""
    few = call.pairs <= FEW_SCORES
    return name not in PLAIN or (few and (name == "dot_product" or call.pairs > FEW_SCORES / 10))


def is_ours(name: str) -> bool:
    """Tell a kernel from another library, and from what is made of kernels."""
    return name in KERNELS


def read_rows(files: Iterable[Path]) -> list[GridRow]:
    """Read rows of files: of a grid, one a line of .jsonl, or what `bench --json` wrote."""
    found = []
    for path in files:
        if path.suffix == ".jsonl":
            found += [GridRow.of_json(json.loads(line)) for line in path.read_text().splitlines()]
            continue
        runs = _runs(json.loads(path.read_text()))
        found += [GridRow.of_json(row) for run in runs for row in run["rows"] if "call" in row]
        found += _of_bench([row for run in runs for row in run["rows"] if "call" not in row])
    return found


def _runs(document: Any) -> list[dict[str, Any]]:
    """List the runs of a file: it is one, or holds several by name."""
    of = document if isinstance(document, dict) else {}
    inside = [run for run in of.values() if isinstance(run, dict) and "rows" in run]
    return [of] if "rows" in of else inside


def _of_bench(rows: list[dict[str, Any]]) -> list[GridRow]:
    """Read the rows of named shapes: the median of each kernel's times."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["what"] in (FORWARD, BACKWARD) and is_ours(row["who"]) and row["ms"]:
            times.setdefault((row["shape"], row["what"], row["who"]), []).append(row["ms"])
    by_shape: dict[str, dict[str, GridTime]] = {}
    for (shape, what, who), its in times.items():
        passes = by_shape.setdefault(shape, {FORWARD: {}, BACKWARD: {}})
        passes[what][who] = median(its)
    return [GridRow(of_shape(read(name)), passes) for name, passes in by_shape.items()]


def to_file(rows: Iterable[GridRow], machine: dict[str, Any]) -> str:
    """Write rows as a file of docs/measured, a row in a line."""
    lines = ",\n  ".join(json.dumps(row.to_json(), separators=(",", ":")) for row in rows)
    return f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n'
