"""Measurements as a table for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from maxattn.target import Target
from maxattn.tools.bench.row import BenchRow
from maxattn.tools.bench.timing import Timed

HEADER = (
    "shape", "who", "pass", "ms", "TFLOP/s", "GiB", "error", "efficiency", "bound ms", "of it",
)  # fmt: skip
LEFT = 3  # columns of words


def as_table(rows: Sequence[BenchRow]) -> str:
    """Return one line a measurement, in columns; columns that none of them fills are left out."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    kept = [i for i in range(len(HEADER)) if i <= LEFT or any(line[i] for line in lines[1:])]
    widths = {i: max(len(line[i]) for line in lines) for i in kept}
    notes = ["", *(_note(row) for row in rows)]
    return "\n".join(_line(*each, widths) for each in zip(lines, notes, strict=True))


def _line(cells: tuple[str, ...], note: str, widths: dict[int, int]) -> str:
    words = (cells[i].ljust(n) if i < LEFT else cells[i].rjust(n) for i, n in widths.items())
    return "  ".join(words).rstrip() + note


def _cells(row: BenchRow) -> tuple[str, ...]:
    words = row.shape, row.who, row.what
    if not row.ms:
        return *words, "-", *("",) * (len(HEADER) - LEFT - 1)
    rate = f"{row.tflops:.0f}" if row.tflops else ""
    memory = f"{row.peak / 2**30:.2f}" if row.peak else ""
    error = "" if row.error is None else f"{row.error:.1e}"
    efficiency = "" if row.efficiency is None else f"{row.efficiency:.3f}"
    bound = ("", "") if row.bound is None else (f"{row.bound:.3f}", f"{row.ms / row.bound:.3f}")
    return *words, f"{row.ms:.3f}", rate, memory, error, efficiency, *bound


def _note(row: BenchRow) -> str:
    return f"  {row.note}" if row.note else ""


def as_kernels(row: BenchRow, timed: Timed, most: int = 24) -> str:
    """Return the device time of one recorded run by kernel, the longest first."""
    p = timed.profile
    time = f"{1e3 * timed.seconds:.3f} ms; one run, first device: {p.span:.3f} ms"
    alone = f"{p.alone:.3f} of them beside no kernel, idle {p.idle:.3f} ms"
    transfers = f", transfers {p.transfers:.3f} ms, {alone}" if p.transfers else ""
    head = f"{row.shape}, {row.who}, {row.what}: {time}{transfers}"
    lines = (f"  {k.ms:9.3f} ms  {k.calls:6.4g} x  {k.name[:100]}" for k in p.kernels[:most])
    return "\n".join((head, *lines))


def to_json(rows: Sequence[BenchRow], target: Target) -> str:
    """Return the measurements and the machine as JSON."""
    import jax

    machine: dict[str, Any] = {"device": target.device_kind, "jax": jax.__version__}
    machine["packages"] = dict(target.packages)
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
