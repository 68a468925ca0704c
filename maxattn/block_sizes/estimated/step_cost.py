"""What one step of a TPU kernel's grid costs, and with it a call of any length.

A kernel's schedule does not depend on how many steps its grid has. So one compile of a short call
prices every call with the same tiles, head dim and dtype, whose keys are padded or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from maxattn.devices import Device

Kind = Literal["fwd", "online", "dkv", "fused", "dq"]
"""The forward, and with the online softmax where a kernel has another too; the backward of K and V,
without and with dQ; the separate backward of Q."""
Tile = tuple[int, ...]
"""Queries, keys, and keys computed at once; the separate backward of Q has the first two."""


class Evaluates(IntEnum):
    """What a kernel evaluates of a mask: nothing; which keys are padding; or the interval of keys
    that a query sees, when it goes through a list of the tiles that are not empty.
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
        """Tell whether all of this one is shorter than all of the other."""
        return self.slow < other.fast


class StepGrid(NamedTuple):
    """How one call is cut into tiles.

    Args:
        heads: heads times batch.
        rows: rows of tiles of a head: of queries, and in the backward of K and V of keys.
        columns: steps of a row.
        masked: the share of steps that evaluate the mask, where a kernel tells them apart.
        idle: the share of steps that compute nothing.
    """

    heads: int
    rows: float
    columns: float
    masked: float
    idle: float = 0.0


class StepCost(NamedTuple):
    """What a step costs.

    Args:
        always: bundles of every step.
        edges: bundles that begin or end a row of tiles.
        full, masked: bundles of the body of a tile without and with the mask; its waits for the
            matrix units; cycles for which it keeps them busy.
        cores: that share the steps.
        step_bytes, row_bytes: between HBM and the kernel, in a step and beside them in a row.
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
        """Return what a step costs on average, fast and slow end."""
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
        """Price a call; the time of HBM where that is longer."""
        core, machine = device.core, device.machine
        assert core is not None and machine is not None, device.kind
        steps = grid.heads * grid.rows * grid.columns
        hbm = self.moved(grid) / machine.hbm
        fast, slow = (steps / self.cores * n / core.clock for n in self.cycles(grid))
        return Seconds(max(fast, hbm), max(slow, hbm))
