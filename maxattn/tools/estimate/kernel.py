"""The time of one kernel call from its schedule, as an interval, and what binds it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from maxattn.devices import Device, TensorCore
from maxattn.errors import Unsupported
from maxattn.tools.estimate.bundles import Bundles, unknown
from maxattn.tools.estimate.slots import FILLS, SPILLS, SlotTable
from maxattn.tools.estimate.step import BodyShares, Cycles, GridStep
from maxattn.tools.estimate.tiles import KernelTiles, Phase
from maxattn.tools.estimate.windows import Window, moved_by_itself, windows_of

_PHASE = re.compile(r"_(fwd|dkv|dq)(?:_|\.|$)")
_TWO_FORMS = "tpu_flash_fwd"  # its second bodies are the online softmax
_CORE_ID = re.compile(r"(%\w+) = sld \[smem:\[[^\]]*\]\] /\* (?:megacore core id :: )?core id\b")


class KernelEstimate(NamedTuple):
    """Hold what is estimated of one call of a kernel on one device; nothing ran.

    Args:
        name: the instruction's.
        calls: how often the program runs it.
        steps: of its grid.
        full, masked: shares of the steps that compute a tile without and with the mask.
        block: queries and keys of a tile; () where they are not known.
        cores, of_cores: cores that share the steps, and those that a device has.
        cycles: of a step, fast and slow end.
        seconds: of a call, fast and slow end; HBM's time where that is longer.
        flops: of the products over allowed pairs; 0 where they are not known.
        peak: FLOP/s of the device.
        slots: the share of each unit's slots that the products' part of a step fills.
        spills, fills: registers that a step writes to memory and reads back.
        hbm: bytes between the kernel and HBM; 0 where that is not known.
        hbm_rate: bytes/s of HBM.
        is_bound: every tile is priced with the mask, since which are visited is not known.
    """

    name: str
    calls: int
    steps: int
    full: float
    masked: float
    block: tuple[int, ...]
    cores: int
    of_cores: int
    cycles: tuple[float, float]
    seconds: tuple[float, float]
    flops: float
    peak: float
    slots: tuple[tuple[str, float], ...]
    spills: int
    fills: int
    hbm: float
    hbm_rate: float
    is_bound: bool


@dataclass(frozen=True)
class KernelDump:
    """Hold what libtpu wrote of a kernel.

    Args:
        name: the instruction's.
        bundles, slots: of the same length.
        device: what it was compiled for.
    """

    name: str
    bundles: Bundles
    slots: SlotTable
    device: Device

    @staticmethod
    def read(name: str, bundles: str, slots: str, device: Device, libtpu: str) -> KernelDump:
        """Read the texts of both files.

        Raises:
            Unsupported: they have another form, or do not fit each other.
        """
        who = f"libtpu {libtpu}'s dump of {name}"
        rows, table = Bundles.read(bundles, who), SlotTable.read(slots, who)
        if len(rows.rows) != len(table.rows):
            rule = f"it has {len(rows.rows)} bundles, and its table {len(table.rows)} rows"
            raise unknown(who, rule)
        return KernelDump(name, rows, table, device)

    @property
    def phase(self) -> Phase | None:
        """What the kernel computes, by its name; None where that says nothing."""
        found = _PHASE.search(self.name)
        return cast(Phase, found.group(1)) if found else None

    def estimate(self, tiles: KernelTiles | None, calls: int = 1) -> KernelEstimate:
        """Price one call.

        Args:
            tiles: what it computes; None: every step runs every body, and nothing else is known.
            calls: how often the program runs it.

        Raises:
            Unsupported: its dump is not understood.
        """
        core, machine = core_of(self.device), self.device.machine
        assert machine is not None, self.device.kind
        shares, step = self._shares(tiles), self.step
        steps, cycles, used = self._steps(tiles), step.cycles(shares), step.used(shares)
        is_bound = tiles is not None and not self._knows(tiles, steps)
        hbm = self._hbm(shares, steps) if tiles else 0.0
        return KernelEstimate(
            name=self.name,
            calls=calls,
            steps=steps,
            full=shares.full,
            masked=shares.masked,
            block=tiles.block if tiles else (),
            cores=self.cores,
            of_cores=core.cores,
            cycles=(cycles.fast, cycles.slow),
            seconds=self._seconds(cycles, steps, hbm / machine.hbm),
            flops=0.0 if tiles is None or is_bound else tiles.flops * steps * sum(shares[:2]),
            peak=core.peak,
            slots=tuple(step.use(shares).items()),
            spills=used[SPILLS],
            fills=used[FILLS],
            hbm=hbm,
            hbm_rate=machine.hbm,
            is_bound=is_bound,
        )

    @cached_property
    def cores(self) -> int:
        """How many cores of the device run it: one where all others skip it.

        Raises:
            Unsupported: the device has several, and nothing in the kernel asks which one it is on.
        """
        have = core_of(self.device).cores
        text = "\n".join(row.text for row in self.bundles.rows)
        ids = _CORE_ID.findall(text)
        if have > 1 and not ids:
            raise unknown(self.bundles.who, "it does not say which of the device's cores run it")
        alone = any(re.search(rf"scmp\.ne\.s32\.totalorder {i}, 0\b", text) for i in ids)
        return 1 if alone else have

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The blocks of its operands."""
        return windows_of(self.bundles)

    @cached_property
    def own_bytes(self) -> int:
        """Bytes that a step which computes a tile moves beside the blocks of its operands."""
        bodies = self.step.bodies
        return moved_by_itself(self.bundles, range(*bodies[0]) if bodies else self.step.always)

    def _steps(self, tiles: KernelTiles | None) -> int:
        """Return the steps of all cores."""
        loop = self.step.loop
        if loop.steps is not None:
            return loop.steps * self.cores
        if tiles is None:
            rule = "only the device knows how many steps its grid has"
            raise Unsupported("estimate", self.name, rule, "leave --estimate out of this program")
        return tiles.heads * (tiles.grids[0] if tiles.is_bound else tiles.visited)

    def _shares(self, tiles: KernelTiles | None) -> BodyShares:
        steps = self._steps(tiles)
        # An output of one block is memory that all steps share.
        rows = [w.blocks for w in self.windows if w.is_output and w.blocks > 1] or [1]
        row = max(1.0, steps / min(rows))
        if tiles is None:
            return self.step.usual_shares(row)
        if not self._knows(tiles, steps):
            return BodyShares(0.0, 1.0, row)
        whole = tiles.visited if tiles.skips_nothing else steps / tiles.heads
        return BodyShares(tiles.full / whole, tiles.masked / whole, row)

    def _knows(self, tiles: KernelTiles, steps: int) -> bool:
        """Tell whether the tiles that a plan visits say which of these steps compute.

        A ring's kernels may have half of the plan's tiles: then they say it where none is skipped.
        """
        if tiles.is_bound:
            return False
        dynamic = self.step.loop.steps is None
        return dynamic or tiles.skips_nothing or steps in {tiles.heads * n for n in tiles.grids}

    @cached_property
    def step(self) -> GridStep:
        """The loop over its grid; of `tpu_flash`, for scores that need no running maximum."""
        forms = 2 if _TWO_FORMS in self.name else 1
        return GridStep(self.bundles, self.slots, core_of(self.device), forms)

    def _seconds(self, cycles: Cycles, steps: int, hbm: float) -> tuple[float, float]:
        clock = core_of(self.device).clock
        fast, slow = (steps / self.cores * each / clock for each in cycles)
        return max(fast, hbm), max(slow, hbm)

    def _hbm(self, shares: BodyShares, steps: int) -> float:
        """Count the bytes between HBM and the kernel, which reads a block where it changes.

        K and V are its inputs 1 and 2. They change at every step, and all else with the row; in the
        backward of K and V it is the other way round.
        """
        inputs = [w for w in self.windows if not w.is_output]
        visited = steps * (shares.full + shares.masked)
        total = sum(float(w.size * w.blocks) for w in self.windows if w.in_hbm and w.is_output)
        for place, window in enumerate(inputs):
            at_each = (place in (1, 2)) != (self.phase == "dkv")
            reads = visited if at_each else steps / shares.row
            total += window.size * reads if window.in_hbm else 0.0
        return total + self.own_bytes * visited


def core_of(device: Device) -> TensorCore:
    """Return what a TPU's schedule is priced with.

    Raises:
        Unsupported: its clock and matrix units are not known.
    """
    if device.core is None:
        rule = "an estimate needs a TPU whose clock and matrix units are public"
        remedy = "take one of v4, v5e, v5p, v6e and v7x, or leave --estimate out"
        raise Unsupported("estimate", device.kind, rule, remedy)
    return device.core
