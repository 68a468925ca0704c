"""The cost of one step of a TPU kernel's grid, and the time of a call computed from it.

A kernel's schedule does not depend on the number of steps in its grid. So one compile of a short
call gives the time of every call with the same tiles, head dim and dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from maxattn.devices import Device

Kind = Literal["fwd", "online", "dkv", "fused", "dq"]
"""The forward ("online": with a running maximum, if the kernel has both forms); the backward of K
and V without dQ ("dkv") or with it ("fused"); the separate backward of Q."""
Tile = tuple[int, ...]
"""Numbers of queries, keys, and keys computed at once (not in the separate backward of Q)."""


class Evaluates(IntEnum):
    """Which test of the mask a kernel evaluates: none; which keys are padding; or each query's
    interval of keys, in a grid that lists the tiles that are not empty.
    """

    NOTHING = 0
    PADDING = 1
    INTERVAL = 2


class Seconds(NamedTuple):
    """An interval of estimated seconds: its fast and its slow end."""

    fast: float
    slow: float

    def plus(self, fast: float, slow: float) -> Seconds:
        return Seconds(self.fast + fast, self.slow + slow)

    def is_below(self, other: Seconds) -> bool:
        """Check whether this interval's slow end is below the fast end of `other`."""
        return self.slow < other.fast


class StepGrid(NamedTuple):
    """The grid of one kernel for a call."""

    heads: int  # number of heads times batch
    rows: float  # number of query tiles per head (key tiles in the backward of K and V)
    columns: float  # number of steps per row
    # the share of steps that evaluate the mask, if the kernel skips the test elsewhere
    masked: float
    idle: float = 0.0  # the share of steps that compute nothing


class StepCost(NamedTuple):
    """The cost of a step; a bundle is the instructions of one cycle."""

    always: int  # number of bundles in every step
    edges: int  # number of bundles in the first and last step of each row, besides `always`
    # full, masked: for a tile without and with a mask test: number of bundles, cycles of waiting
    # for the matrix units, cycles in which the matrix units are busy
    full: tuple[float, float, float]
    masked: tuple[float, float, float]
    cores: int  # number of cores that share the steps
    # step_bytes, row_bytes: bytes moved between HBM and VMEM, per step and per row
    step_bytes: float
    row_bytes: float
    spills: int  # number of registers that a step writes to memory

    @staticmethod
    def of(values: Sequence[Any]) -> StepCost:
        """Make a cost from the list of its fields in order, as in table.json."""
        read: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
        return StepCost(*read)

    def cycles(self, grid: StepGrid) -> tuple[float, float]:
        """Return the fast and the slow end of a step's mean number of cycles."""
        shares = 1.0 - grid.masked - grid.idle, grid.masked
        bodies = zip(self.full, self.masked, strict=True)
        bundles, waits, busy = (sum(s * x for s, x in zip(shares, b, strict=True)) for b in bodies)
        issued = self.always + self.edges / grid.columns + bundles
        return max(issued, busy), issued + waits

    def moved(self, grid: StepGrid) -> float:
        """Return the bytes that a call moves between HBM and VMEM."""
        rows = grid.heads * grid.rows
        return rows * (grid.columns * (1.0 - grid.idle) * self.step_bytes + self.row_bytes)

    def seconds(self, grid: StepGrid, device: Device) -> Seconds:
        """Return a call's time: its compute time or its HBM transfer time, whichever is longer."""
        core, machine = device.core, device.machine
        assert core is not None and machine is not None, device.kind
        steps = grid.heads * grid.rows * grid.columns
        hbm = self.moved(grid) / machine.hbm
        fast, slow = (steps / self.cores * n / core.clock for n in self.cycles(grid))
        return Seconds(max(fast, hbm), max(slow, hbm))


Costs = Mapping[tuple[Kind, Evaluates], Mapping[Tile, StepCost]]
"""The cost of a step, by (kernel, mask test), then by tile."""
