"""One measurement: the function that is measured, and the row that says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from maxattn.tools.bench.timing import Timed, TimedFunction
from maxattn.tools.model_shapes import Shape

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # in units of 4 B N T S H operations


@dataclass(frozen=True)
class BenchRow:
    """Hold one measurement.

    Args:
        shape, who, what: name of the shape, the kernel or library, and "forward", "backward" or
            "forward+backward".
        ms: device time of one call; 0 where it failed.
        tflops: useful operations, of allowed pairs alone, in TFLOP/s.
        peak: bytes of arguments, results and temporaries, as the compiler reports them.
        error: largest difference from float32 of some outputs, relative to their largest entry.
        note: why there is no time.
        efficiency: of several devices: the time of one, over that of n times n.
        bound: of a module: what its time is compared with, in ms.
    """

    shape: str
    who: str
    what: str
    ms: float = 0.0
    tflops: float = 0.0
    peak: int = 0
    error: float | None = None
    note: str = ""
    efficiency: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class BenchJob:
    """Hold one function to measure, and the row that it fills.

    Args:
        row: its names; with a note there is nothing to measure.
        shape: of the attention.
        f: the function.
        make: returns its inputs: several tuples of arguments of one shape.
        around: a context in which it is traced and compiled.
        count: whether its operations are those of an attention.
        judged: whether its result is one, to compare with the reference.
    """

    row: BenchRow
    shape: Shape
    f: Callable[..., Any] = print
    make: Callable[[], list[tuple[Any, ...]]] = list
    around: Callable[[], AbstractContextManager[Any]] | None = None
    count: bool = True
    judged: bool = True

    @property
    def work(self) -> TimedFunction:
        """What is measured."""
        return TimedFunction(self.f, self.make, self.around, f"{self.row.who}, {self.row.what}")


def row_of(job: BenchJob, timed: Timed, wanted: Timed | None) -> BenchRow:
    """Fill a row with what was measured.

    Args:
        job: what was measured.
        timed: its time.
        wanted: the reference's result, which that of a forward is compared with; None for none.
    """
    if not timed.seconds:
        return replace(job.row, note=timed.failed)
    row = replace(job.row, ms=1e3 * timed.seconds, peak=timed.peak)
    if not job.count:
        return row
    row = replace(row, tflops=operations(job.shape) * WORK[row.what] / timed.seconds / 1e12)
    if row.what != FORWARD or not job.judged or wanted is None or wanted.first is None:
        return row
    return replace(row, error=_error(timed.first, wanted.first))


def _error(result: Any, wanted: Any) -> float:
    out = result[0] if isinstance(result, tuple) else result
    got = out[:1, : wanted.shape[1]].astype(jnp.float32)
    return float(jnp.abs(got - wanted).max() / jnp.abs(wanted).max())


def operations(shape: Shape) -> float:
    """Count the operations of a forward, those of allowed pairs alone."""
    pairs = shape.mask.bind(shape.q_len, shape.kv_len).allowed_pairs(shape.q_len, shape.kv_len)
    channels = shape.head_dim + (shape.value_dim or shape.head_dim)
    return 2.0 * shape.batch * shape.heads * channels * pairs


def scores_bytes(shape: Shape) -> float:
    """Return the bytes of all scores in float32."""
    return 4.0 * shape.batch * shape.heads * shape.q_len * shape.kv_len
