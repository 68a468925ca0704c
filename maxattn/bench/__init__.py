"""Measuring attention: device time, TFLOP/s, memory and error of every kernel that this machine can run."""

from __future__ import annotations

from maxattn.bench.measure import Row, bench_peers, bench_shape
from maxattn.bench.report import table, to_json

__all__ = ["Row", "bench_peers", "bench_shape", "table", "to_json"]
