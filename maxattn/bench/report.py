"""Measurements as a table for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from maxattn.bench.measure import Row
from maxattn.target import Target

HEADER = ("shape", "who", "pass", "ms", "TFLOP/s", "GiB", "error")


def as_table(rows: Sequence[Row]) -> str:
    """Return one line a measurement, in columns."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    return "\n".join(
        "  ".join(_aligned(line, widths)).rstrip() + _note(row) for line, row in zip(lines, (None, *rows), strict=True)
    )


def _cells(row: Row) -> tuple[str, ...]:
    if not row.ms:
        return row.shape, row.who, row.what, "-", "-", "-", "-"
    error = "" if row.error is None else f"{row.error:.1e}"
    return row.shape, row.who, row.what, f"{row.ms:.3f}", f"{row.tflops:.0f}", f"{row.peak / 2**30:.2f}", error


def _aligned(cells: tuple[str, ...], widths: list[int]) -> list[str]:
    return [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]


def _note(row: Row | None) -> str:
    return f"  {row.note}" if row is not None and row.note else ""


def to_json(rows: Sequence[Row], target: Target) -> str:
    """Return the measurements and the machine as JSON."""
    import jax

    machine: dict[str, Any] = {"device": target.device_kind, "jax": jax.__version__, "packages": dict(target.packages)}
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
