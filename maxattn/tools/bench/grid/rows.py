"""What was measured of one call of a grid, and the files that hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD

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


def read_rows(files: Iterable[Path]) -> list[GridRow]:
    """Read rows of files: JSON with "rows", or a row in a line."""
    found = []
    for path in files:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else []
        rows = [json.loads(line) for line in lines] if lines else json.loads(text)["rows"]
        found += [GridRow.of_json(row) for row in rows]
    return found


def to_file(rows: Iterable[GridRow], machine: dict[str, Any]) -> str:
    """Write rows as a file of docs/measured, a row in a line."""
    lines = ",\n  ".join(json.dumps(row.to_json(), separators=(",", ":")) for row in rows)
    return f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n'
