"""Compare the tiles of MaxDiffusion's configs with those of plans, as a Markdown table:

    python -m benchmarks.tpu_tiles_of_others LOG

Times are estimates of libtpu's schedules; nothing runs. Kernels that the shipped table lacks are
compiled and stored in LOG: a stopped run continues from it. MaxDiffusion's tiles have the limit of
VMEM that its README sets for training, and are adjusted by the rules if they do not compile;
maxattn's have the compiler's own limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from maxattn.block_sizes import DKV, DQ, FORWARD, BlockSizes, adjust
from maxattn.block_sizes.estimated.choose import in_ms, seconds_of, tiles_of
from maxattn.block_sizes.estimated.grids import evaluates
from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, Kind, Seconds, StepCost, Tile
from maxattn.block_sizes.estimated.table import shipped_costs
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.kernels.auto.tpu import seconds_taken, tiled_kernels
from maxattn.target import Target
from maxattn.tools.model_shapes import SHAPES
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedules import ScheduleCompiler, ScheduleLog, costs_of
from tests.block_sizes.presets_of_others import LIMIT, PRESETS

KEYS = (*FORWARD, *DKV, *DQ)
SECONDS = 900.0  # time limit of one compile
FLAGS = "LIBTPU_INIT_ARGS"
CALLS = {
    "wan-14b-720p": ("Wan 14B", "Wan 14B, v6e", "Wan 720p, v6e", "Wan 14B, v5p", "Wan I2V 14B",
                     "Wan I2V 27B", "Wan Animate"),
    "flux-1024": ("Flux dev", "Flux schnell, v6e"),
}  # fmt: skip
Found = dict[tuple[Kind, Evaluates], dict[Tile, StepCost]]


class Row(NamedTuple):
    """One preset on one chip, in one pass.

    Args:
        preset: the preset's name.
        kind: the kind of device.
        name: the name of the call.
        training: whether both passes count, or the forward alone.
    """

    preset: str
    kind: str
    name: str
    training: bool

    @property
    def call(self) -> Call:
        """The call that one device computes."""
        return SHAPES[self.name].call()

    @property
    def theirs(self) -> BlockSizes:
        """The preset's sizes, adjusted so that they compile."""
        preset, keys = PRESETS[self.preset], KEYS[: None if self.training else 3]
        sizes = dict(zip(keys, preset.sizes, strict=False))
        asked = FlashBlockSizes(**sizes, use_fused_bwd_kernel=preset.fused)
        target = Target(**{**Target.named(self.kind).__dict__, "env": ((FLAGS, LIMIT),)})
        return adjust(asked, self.call, "flash", target, self.training)[0]

    def jobs(self) -> Iterator[KernelJob]:
        """Yield the kernels that the shipped table lacks."""
        known = shipped_costs(self.kind, "flash", self.call.head_dim, self.call.dtype)
        for kind, tile in tiles_of(self.theirs).items():
            what = evaluates(self.call, tile)
            if tile not in known.get((kind, what), {}):
                sizes = tile, self.call.head_dim, self.call.dtype
                yield KernelJob(self.kind, "flash", kind, *sizes, what)


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    for name, presets in CALLS.items():
        for preset in presets:
            for kind in PRESETS[preset].chips:
                yield from (Row(preset, kind, name, training) for training in (False, True))


def main() -> None:
    """Compile the missing kernels, and print the table."""
    os.environ[FLAGS] = LIMIT
    found = dict[str, Found]()
    with ScheduleCompiler(SECONDS) as compiler:
        log = ScheduleLog(Path(sys.argv[1]), compiler.versions)
        for job in dict.fromkeys(job for row in rows() for job in row.jobs()):
            answer = log.find(job)
            if answer is None:
                answer = compiler.answer(job)
                log.add(job, answer)
            for kind, cost in costs_of(job.kind, answer).items():
                costs = found.setdefault(job.device_kind, {})
                costs.setdefault((kind, job.masked), {})[job.tile] = cost
    del os.environ[FLAGS]
    print("| chip | preset of MaxDiffusion | call | pass | its tiles | flash, tiles by estimates |"
          " `auto` takes | gain, flash | gain, `auto` |\n" + "|---" * 9 + "|")  # fmt: skip
    for row in rows():
        print(_line(row, found.get(row.kind, {})))


def _line(row: Row, found: Found) -> str:
    """Format one row; gains compare slow ends."""
    call, target = row.call, Target.named(row.kind)
    theirs = seconds_of(_with_known(row, found), row.theirs, call, "flash", target)
    (takes, *_), _ = tiled_kernels(call, target)
    takes = takes if row.training else takes.split("/")[0]
    flash, own = (seconds_taken(name, call, target, row.training) for name in ("flash", takes))
    assert flash and own, row
    chip, what = row.kind.removeprefix("TPU "), "training" if row.training else "forward"
    cells = (
        f"{in_ms(theirs)}: {row.theirs}" if theirs else f"not estimated: {row.theirs}",
        in_ms(flash),
        f"{takes}, {in_ms(own)}",
        _gain(theirs, flash),
        _gain(theirs, own),
    )
    return f"| {chip} | {row.preset} | {row.name} | {what} | {' | '.join(cells)} |"


def _with_known(row: Row, found: Found) -> Costs:
    known = shipped_costs(row.kind, "flash", row.call.head_dim, row.call.dtype)
    return {key: {**known.get(key, {}), **found.get(key, {})} for key in {*known, *found}}


def _gain(theirs: Seconds | None, ours: Seconds) -> str:
    return f"{theirs.slow / ours.slow:.2f}" if theirs else ""


if __name__ == "__main__":
    main()
