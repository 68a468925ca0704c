"""Measuring attention: device time, TFLOP/s, memory and error of every kernel that this machine can
run.
"""

from __future__ import annotations

from maxattn.tools.bench.measure import Row, bench
from maxattn.tools.bench.report import as_table, to_json

__all__ = ["Row", "as_table", "bench", "to_json"]
