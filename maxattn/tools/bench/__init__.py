"""Measuring attention: device time, TFLOP/s, memory and error of every kernel that runs here."""

from __future__ import annotations

from maxattn.tools.bench.measure import bench
from maxattn.tools.bench.report import as_table, to_json
from maxattn.tools.bench.row import BenchRow

__all__ = ["BenchRow", "as_table", "bench", "to_json"]
