"""Measuring attention: device time, TFLOP/s, memory and error of every kernel that runs here."""

from __future__ import annotations

from maxattn.tools.bench.kernels import bench
from maxattn.tools.bench.row import BenchRow, as_table, to_json

__all__ = ["BenchRow", "as_table", "bench", "to_json"]
