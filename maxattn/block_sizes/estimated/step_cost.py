"""The cost of one step of a TPU kernel's grid, and with it of a call of any length.

A kernel's schedule does not depend on how many steps its grid has. So one compile of a short call
prices every call with the same tiles, head dim and dtype, with padded keys or without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from maxattn.devices import Device

Kind = Literal["fwd", "online", "dkv", "fused", "dq"]
"""The forward, also with the online softmax if a kernel has two; the backward of K and V, without
and with dQ; the separate backward of Q."""
Tile = tuple[int, ...]
"""Queries, keys, and keys computed at once; the separate backward of Q has the first two."""


class Evaluates(IntEnum):
    """What a kernel evaluates of a mask: nothing; which keys are padding; or the interval of keys
    of each query, in a list of the tiles that are not empty.
    """

    NOTHING = 0
    PADDING = 1
    INTERVAL = 2


class Seconds(NamedTuple):
    """Seconds, fast and slow end."""

    fast: float
    slow: float

    def plus(self, fast: float, slow: float) -> Seconds:
        return Seconds(self.fast + fast, self.slow + slow)

    def is_below(self, other: Seconds) -> bool:
        """Check whether this interval ends before the other begins."""
        return self.slow < other.fast


class StepGrid(NamedTuple):
    """How one call is cut into tiles.

    Args:
        heads: heads times batch.
        rows: rows of tiles of a head: of queries, and in the backward of K and V of keys.
        columns: steps of a row.
        masked: the share of steps that evaluate the mask, if a kernel distinguishes them.
        idle: the share of steps that compute nothing.
    """

    heads: int
    rows: float
    columns: float
    masked: float
    idle: float = 0.0


class StepCost(NamedTuple):
    """The cost of a step.

    Args:
        always: bundles of every step.
        edges: bundles that begin or end a row of tiles.
        full, masked: of a tile without and with the mask: bundles of its body, waits for the matrix
            units, cycles in which they are busy.
        cores: the cores that share the steps.
        step_bytes, row_bytes: bytes between HBM and the kernel, in a step and once a row.
        spills: registers that a step writes to memory.
    """

    always: int
    edges: int
    full: tuple[float, float, float]
    masked: tuple[float, float, float]
    cores: int
    step_bytes: float
    row_bytes: float
    spills: int

    @staticmethod
    def of(values: Sequence[Any]) -> StepCost:
        """Read the fields in order, as JSON has them."""
        read: list[Any] = [tuple(v) if isinstance(v, list) else v for v in values]
        return StepCost(*read)

    def cycles(self, grid: StepGrid) -> tuple[float, float]:
        """Return the mean cycles of a step, fast and slow end."""
        shares = 1.0 - grid.masked - grid.idle, grid.masked
        bodies = zip(self.full, self.masked, strict=True)
        bundles, waits, busy = (sum(s * x for s, x in zip(shares, b, strict=True)) for b in bodies)
        issued = self.always + self.edges / grid.columns + bundles
        return max(issued, busy), issued + waits

    def moved(self, grid: StepGrid) -> float:
        """Return the bytes of a call between HBM and the kernel."""
        rows = grid.heads * grid.rows
        return rows * (grid.columns * (1.0 - grid.idle) * self.step_bytes + self.row_bytes)

    def seconds(self, grid: StepGrid, device: Device) -> Seconds:
        """Price a call: its cycles, or the time of HBM if that is longer."""
        core, machine = device.core, device.machine
        assert core is not None and machine is not None, device.kind
        steps = grid.heads * grid.rows * grid.columns
        hbm = self.moved(grid) / machine.hbm
        fast, slow = (steps / self.cores * n / core.clock for n in self.cycles(grid))
        return Seconds(max(fast, hbm), max(slow, hbm))


Costs = Mapping[tuple[Kind, Evaluates], Mapping[Tile, StepCost]]
"""The cost of a step, by kernel and what it evaluates of a mask, and by tile."""
