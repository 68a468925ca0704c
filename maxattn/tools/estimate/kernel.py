"""Estimate the time of one kernel call from its schedule, as an interval."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

import numpy as np

from maxattn._plan import Plan
from maxattn.block_sizes import DKV, DQ, FORWARD, BlockSizes
from maxattn.block_sizes.estimated.step_cost import StepCost, StepGrid
from maxattn.call import Call
from maxattn.decide import kernel_call
from maxattn.devices import Device, TensorCore
from maxattn.errors import Unsupported
from maxattn.kernels import computed_call
from maxattn.kernels.composed.pair import kernels_of
from maxattn.kernels.splash.calls import Setup
from maxattn.kernels.splash.kernel import Splash
from maxattn.kernels.splash.tokamax import PARTIAL, WHOLE, marks_of
from maxattn.masks.terms import supported_split
from maxattn.masks.tile_kinds import tile_kinds
from maxattn.tools.estimate.bundles import (
    SPILLS,
    Bundles,
    SlotTable,
    Window,
    moved_by_itself,
    unknown,
    windows_of,
)
from maxattn.tools.estimate.step import BodyShares, GridStep

_PHASE = re.compile(r"_(fwd|dkv|dq)(?:_|\.|$)")
_TWO_FORMS = "tpu_flash_fwd"  # its second form of each body computes the online softmax
_RECOMPUTES = "few_keys_fwd"  # it computes a step again, with a maximum, if scores are large
_CORE_ID = re.compile(r"(%\w+) = sld \[smem:\[[^\]]*\]\] /\* (?:megacore core id :: )?core id\b")
KEYS = 1, 2  # the inputs K and V


class KernelEstimate(NamedTuple):
    """The estimate of one kernel call on one device; nothing ran."""

    name: str  # the HLO instruction's name
    calls: int  # how often the program runs the kernel
    steps: int  # number of grid steps
    # full, masked: shares of the steps that compute a tile without and with the mask
    full: float
    masked: float
    block: tuple[int, ...]  # queries and keys of a tile; () if unknown
    # cores, of_cores: cores that share the steps, and all cores of a device
    cores: int
    of_cores: int
    cycles: tuple[float, float]  # cycles of a step, at the fast and the slow end
    # seconds of a call, at both ends; at least the time of its HBM traffic
    seconds: tuple[float, float]
    flops: float  # FLOPs of the matmuls over allowed pairs; 0 if unknown
    peak: float  # FLOP/s of the device
    # by unit, the share of slots filled in the part of a step that has the matmuls
    slots: tuple[tuple[str, float], ...]
    spills: int  # registers that a step writes to memory
    hbm: float  # bytes between the kernel and HBM; 0 if unknown
    hbm_rate: float  # bytes/s of HBM
    is_bound: bool  # whether the visited tiles are unknown, so that all are priced with the mask
    bundles: int  # bundles of the program, whatever a step runs
    longest: int  # most bundles that a step runs
    cost: StepCost  # cost of a step, from which the time of a call with another grid follows


@dataclass(frozen=True)
class KernelDump:
    """libtpu's dump of a kernel: bundles and slots have the same length."""

    name: str
    bundles: Bundles
    slots: SlotTable
    device: Device

    @staticmethod
    def read(name: str, bundles: str, slots: str, device: Device, libtpu: str) -> KernelDump:
        who = f"libtpu {libtpu}'s dump of {name}"
        rows, table = Bundles.read(bundles, who), SlotTable.read(slots, who)
        if len(rows.rows) != len(table.rows):
            rule = f"it has {len(rows.rows)} bundles, and its table {len(table.rows)} rows"
            raise unknown(who, rule)
        return KernelDump(name, rows, table, device)

    @property
    def phase(self) -> Phase | None:
        """The kernel's pass, from its name; None if the name has none."""
        found = _PHASE.search(self.name)
        return cast(Phase, found.group(1)) if found else None

    @cached_property
    def cores(self) -> int:
        """How many cores of the device run the kernel: one if the others skip it."""
        have = core_of(self.device).cores
        text = "\n".join(row.text for row in self.bundles.rows)
        ids = _CORE_ID.findall(text)
        if have > 1 and not ids:
            raise unknown(self.bundles.who, "it does not show which of the cores run the kernel")
        alone = any(re.search(rf"scmp\.ne\.s32\.totalorder {i}, 0\b", text) for i in ids)
        return 1 if alone else have

    @cached_property
    def step(self) -> GridStep:
        """The loop over the grid; for `tpu_flash`, the form without a running maximum."""
        forms = 2 if _TWO_FORMS in self.name else 1
        again = _RECOMPUTES in self.name
        return GridStep(self.bundles, self.slots, core_of(self.device), forms, again)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        return windows_of(self.bundles)

    def cost(self, steps: int, row: float) -> StepCost:
        """Return the cost of a step, for a grid of `steps` steps with `row` steps in each tile row.

        K and V are fetched at every step, and the other inputs once in a tile row. In the backward
        of K and V, the other inputs are fetched at every step, and K and V once in a tile row. If
        a tile row has a single step, K and V stay until another of their blocks is needed.
        """
        step, bodies = self.step, self.step.bodies
        inputs = [w for w in self.windows if not w.is_output]
        at_each = [(place in KEYS) != (self.phase == "dkv") for place in range(len(inputs))]
        at_each += [w.blocks == steps for w in self.windows if w.is_output]
        in_step = moved_by_itself(self.bundles, range(*bodies[0]) if bodies else step.always)
        in_row = 0.0
        for window, is_each in zip(self.windows, at_each, strict=True):
            if window.in_hbm and is_each:
                in_step += window.size * (min(1, window.blocks / steps) if row == 1 else 1)
            elif window.in_hbm:
                in_row += window.size * (window.blocks * row / steps if window.is_output else 1)
        spills = step.used(BodyShares(1.0, 0.0, row))[SPILLS]
        sizes = len(step.always), step.edges, *step.costs()
        return StepCost(*sizes, self.cores, in_step, in_row, spills)

    def estimate(self, tiles: KernelTiles | None, calls: int = 1) -> KernelEstimate:
        """Estimate one of `calls` calls; without tiles, a step runs the body with most matmuls."""
        core, machine = core_of(self.device), self.device.machine
        assert machine is not None, self.device.kind
        steps = self._steps(tiles)
        shares = self._shares(tiles, steps)
        used, visited = self.step.used(shares), shares.full + shares.masked
        idle = 1.0 - visited if self.step.bodies else 0.0
        grid = StepGrid(1, steps / shares.row, shares.row, shares.masked, idle)
        cost = self.cost(steps, shares.row)
        if tiles is None:
            cost = cost._replace(step_bytes=0, row_bytes=0)
        is_bound = tiles is not None and not self._knows(tiles, steps)
        return KernelEstimate(
            name=self.name,
            calls=calls,
            steps=steps,
            full=shares.full,
            masked=shares.masked,
            block=tiles.block if tiles else (),
            cores=self.cores,
            of_cores=core.cores,
            cycles=cost.cycles(grid),
            seconds=cost.seconds(grid, self.device),
            flops=0.0 if tiles is None or is_bound else tiles.flops * steps * visited,
            peak=core.peak,
            slots=tuple(self.step.use(shares).items()),
            spills=used[SPILLS],
            hbm=cost.moved(grid),
            hbm_rate=machine.hbm,
            is_bound=is_bound,
            bundles=len(self.bundles.rows),
            longest=self.step.longest,
            cost=cost,
        )

    def _steps(self, tiles: KernelTiles | None) -> int:
        loop = self.step.loop
        if loop.steps is not None:
            return loop.steps * self.cores
        if tiles is None:
            rule = "the number of its grid steps is known only on the device"
            remedy = "write --mask or --visited for a --kernel-file, or leave --estimate out"
            raise Unsupported("estimate", self.name, rule, remedy)
        return tiles.heads * (tiles.grids[0] if tiles.is_bound else tiles.visited)

    def _shares(self, tiles: KernelTiles | None, steps: int) -> BodyShares:
        # An output of a single block does not show tile rows: all steps share it.
        rows = [w.blocks for w in self.windows if w.is_output and w.blocks > 1] or [1]
        row = max(1.0, steps / min(rows))
        if tiles is None:
            # Every step runs the body with most matmuls; another is for a partial last tile.
            return BodyShares(1.0, 0.0, row)
        if not self._knows(tiles, steps):
            return BodyShares(0.0, 1.0, row)
        whole = tiles.visited if tiles.skips_nothing else steps / tiles.heads
        return BodyShares(tiles.full / whole, tiles.masked / whole, row)

    def _knows(self, tiles: KernelTiles, steps: int) -> bool:
        """Check whether the tiles match a grid of `steps` steps, or in a ring half of the tiles."""
        if tiles.is_bound:
            return False
        dynamic = self.step.loop.steps is None
        return dynamic or tiles.skips_nothing or steps in {tiles.heads * n for n in tiles.grids}


def step_cost_of(dump: KernelDump, columns: int, steps: int) -> StepCost:
    """Return a step's cost in a grid of any length, from a dump with several tile rows."""
    known = dump.step.loop.steps
    made = steps if known is None else known * dump.cores
    if made != steps:
        rule = f"its grid must have {steps} steps, and has {made}"
        raise Unsupported("estimate", dump.name, rule, "leave this kernel out of the estimate")
    cost = dump.cost(steps, columns)
    return cost._replace(step_bytes=round(cost.step_bytes), row_bytes=round(cost.row_bytes))


def online_cost_of(dump: KernelDump, cost: StepCost) -> StepCost | None:
    """Return a step's cost with the online softmax; None if the kernel has only one form."""
    if dump.step.forms == 1 and not dump.step.recomputes:
        return None
    full, masked = dump.step.costs(1)
    spills = dump.slots.used([*range(*dump.step.bodies_of(1)[0])])[SPILLS]
    return cost._replace(full=full, masked=masked, spills=spills)


def core_of(device: Device) -> TensorCore:
    """Return a TPU's core, whose clock and matrix units price the schedules."""
    if device.core is None:
        rule = "an estimate needs a TPU whose clock and matrix units are public"
        remedy = "name one of v4, v5e, v5p, v6e and v7x, or leave --estimate out"
        raise Unsupported("estimate", device.kind, rule, remedy)
    return device.core


# ---- tiles of a plan's mask ----------------------------------------------------------------------

Phase = Literal["fwd", "dkv", "dq"]
"""The forward; the backward of K and V, of Q too when fused; the separate backward of Q."""
_KEYS: dict[Phase, tuple[str, ...]] = {"fwd": FORWARD, "dkv": DKV, "dq": DQ}
_PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}  # matmuls in each visited tile; a fused dkv has 5


class KernelTiles(NamedTuple):
    """The tiles that one call of a kernel computes."""

    block: tuple[int, ...]  # queries and keys of a tile; () if unknown
    # full, masked: number of visited tiles of one head, without and with a test of the mask
    full: int
    masked: int
    # possible numbers of steps for one head: all tiles, or the tile rows (columns) times the most
    # visited tiles of a tile row (column)
    grids: tuple[int, ...]
    heads: int  # heads times batch
    flops: float  # FLOPs of the matmuls over allowed pairs, per visited tile
    # whether the visited tiles differ by rank; then `full` and `masked` mean nothing
    is_bound: bool

    @property
    def visited(self) -> int:
        return self.full + self.masked

    @property
    def skips_nothing(self) -> bool:
        return not self.is_bound and self.visited == self.grids[0]


def tiles_of(plan: Plan, training: bool) -> dict[Phase, KernelTiles]:
    """Count the tiles of a plan's Pallas kernels; return {} if its kernel has no tiles."""
    if not all(isinstance(kernel.computes, Splash) for kernel in kernels_of(plan.kernel)):
        return {}
    blocks = (plan.kernel if training else plan.kernel.for_inference()).blocks
    assert blocks is not None, plan.kernel
    phases: list[Phase] = ["fwd", "dkv", "dq"] if training else ["fwd"]
    runs: list[Phase] = [phase for phase in phases if blocks.part(_KEYS[phase]) is not None]
    return {phase: _tiles(plan, blocks, phase) for phase in runs}


def _tiles(plan: Plan, sizes: BlockSizes, phase: Phase) -> KernelTiles:
    local = plan.strategy.kernel_call(kernel_call(plan.padded_call, plan.strategy))
    call = computed_call(plan.kernel.name, local, plan.target.platform)
    part = sizes.part(_KEYS[phase])
    assert part is not None, (sizes, phase)
    block, heads = (part[0], part[1]), call.batch * call.heads
    marks, pairs = _marks(call, block), call.mask.allowed_pairs(call.q_len, call.kv_len)
    full, masked = (int(np.count_nonzero(marks == mark)) for mark in (WHOLE, PARTIAL))
    (rows, columns), visited = marks.shape, marks != 0
    widest, tallest = (int(visited.sum(axis=axis).max()) for axis in (1, 0))
    grids = rows * columns, rows * widest, tallest * columns
    fused = phase == "dkv" and bool(sizes.use_fused_bwd_kernel)
    operations = 2 * call.head_dim * (_PRODUCTS[phase] + fused) * pairs
    a_tile = operations / max(1, full + masked)
    is_bound = call.sharded and not call.mask.is_full
    return KernelTiles(block, full, masked, grids, heads, a_tile, is_bound)


def _marks(call: Call, block: tuple[int, int]) -> np.ndarray:
    parts = supported_split(call.mask)
    kinds = tile_kinds(parts.positions, *block, call.q_len, call.kv_len, 0, 0)
    rows, columns = kinds.shape
    padded = rows * block[0], columns * block[1]
    shows = padded[1] > call.kv_len and not parts.has_ids
    return marks_of(Setup(kinds, None, None, padded, shows))
