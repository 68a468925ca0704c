"""One measurement: the function to measure, the table row for its result, and the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from maxattn.measuring.columns import columns
from maxattn.measuring.timing import Timed, TimedFunction
from maxattn.target import Target
from maxattn.tools.model_shapes import Shape

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
WORK = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # in units of a forward's FLOPs


@dataclass(frozen=True)
class BenchRow:
    """One measurement."""

    # shape, who, what: names of the shape, of the kernel or library, and of the pass: "forward",
    # "backward" or "forward+backward"
    shape: str
    who: str
    what: str
    ms: float = 0.0  # device time of one call; 0 if it failed
    tflops: float = 0.0  # TFLOP/s, counting allowed pairs alone
    peak: int = 0  # bytes of arguments, results and temporaries, as the compiler reports them
    # largest difference from the float32 reference, over the reference's largest entry
    error: float | None = None
    note: str = ""  # why the time is missing, or ""
    efficiency: float | None = None  # t(1) / (n t(n)), for n devices
    bound: float | None = None  # for a module, the bound in ms that `bench/module.py` defines


@dataclass(frozen=True)
class BenchJob:
    """A function to measure, with the arguments of `TimedFunction`, and the row for its result.

    If the row has a note, nothing is measured. If `is_attention`, the function's FLOPs are counted,
    and a forward's result is compared with the reference.
    """

    row: BenchRow
    shape: Shape
    f: Callable[..., Any] = print
    make: Callable[[], list[tuple[Any, ...]]] = list
    around: Callable[[], AbstractContextManager[Any]] | None = None
    is_attention: bool = True

    @property
    def work(self) -> TimedFunction:
        """The function to time."""
        name = f"{self.row.who}, {self.row.what}"
        return TimedFunction(self.f, self.make, self.around, name, self.is_compared)

    @property
    def is_compared(self) -> bool:
        """Whether the result is compared with the reference."""
        return self.is_attention and self.row.what == FORWARD


def refused_job(shape: Shape, who: str, why: object) -> BenchJob:
    """Return a job that is not measured, whose note is the first line of the reason."""
    return BenchJob(BenchRow(shape.name, who, FORWARD, note=str(why).splitlines()[0]), shape)


def row_of(job: BenchJob, timed: Timed, wanted: Timed | None = None) -> BenchRow:
    """Return the job's row with its times and error; `wanted` is the timed reference, if any."""
    if not timed.seconds:
        return replace(job.row, note=timed.failed)
    row = replace(job.row, ms=1e3 * timed.seconds, peak=timed.peak)
    if not job.is_attention:
        return row
    row = replace(row, tflops=job.shape.operations * WORK[row.what] / timed.seconds / 1e12)
    if not job.is_compared or wanted is None or wanted.first is None:
        return row
    out = timed.first[0] if isinstance(timed.first, tuple) else timed.first
    got, want = out[:1, : wanted.first.shape[1]].astype(jnp.float32), wanted.first
    return replace(row, error=float(jnp.abs(got - want).max() / jnp.abs(want).max()))


# ---- reports -------------------------------------------------------------------------------------

HEADER = (
    "shape", "who", "pass", "ms", "TFLOP/s", "GiB", "error", "efficiency", "bound ms", "ms/bound",
)  # fmt: skip
WORDS = 3  # number of columns with words


def as_table(rows: Sequence[BenchRow]) -> str:
    """Return a line for each measurement, in columns; empty columns are left out."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    kept = [i for i in range(len(HEADER)) if i <= WORDS or any(line[i] for line in lines[1:])]
    notes = ["", *(f"  {row.note}" if row.note else "" for row in rows)]
    table = columns([[line[i] for i in kept] for line in lines], WORDS)
    return "\n".join(line + note for line, note in zip(table, notes, strict=True))


def _cells(row: BenchRow) -> tuple[str, ...]:
    words = row.shape, row.who, row.what
    if not row.ms:
        return *words, "-", *("",) * (len(HEADER) - WORDS - 1)
    rate = f"{row.tflops:.0f}" if row.tflops else ""
    memory = f"{row.peak / 2**30:.2f}" if row.peak else ""
    error = "" if row.error is None else f"{row.error:.1e}"
    efficiency = "" if row.efficiency is None else f"{row.efficiency:.3f}"
    bound = ("", "") if row.bound is None else (f"{row.bound:.3f}", f"{row.ms / row.bound:.3f}")
    return *words, f"{row.ms:.3f}", rate, memory, error, efficiency, *bound


def to_json(rows: Sequence[BenchRow], target: Target) -> str:
    """Return the measurements and the machine as JSON."""
    machine: dict[str, Any] = {"device": target.device_kind, "jax": jax.__version__}
    machine["packages"] = dict(target.packages)
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
