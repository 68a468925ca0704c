"""FlashAttention-4's Hopper backward of fa4-jax whose rows of work are cut into parts: fa4_rounds.py.

A block of threads goes through a part of the queries, and writes dK and dV to a batch row of its own.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4_kernels import scheduled

ROW = 14  # which operand of the library's `epilogue_dKV` is the batch row


@cache
def parts_class(batch: int, parts: int) -> Any:
    """Make a backward of so many batch rows whose blocks of threads take a part of the queries each.

    Its dK and dV have a batch row for each of them, part by part.
    """
    ranges, arch = import_module("fa4_jax.cute.block_info").BlockInfo, import_module("cutlass.cute").arch

    class Part(ranges):
        def get_m_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            _, end = super().get_m_block_min_max(*of)
            part = arch.block_idx()[2] // batch
            return part * end // parts, (part + 1) * end // parts

    def of_part(operands: tuple[Any, ...]) -> list[Any]:
        return [Part(**vars(x)) if isinstance(x, ranges) else x for x in operands]

    class InParts(scheduled(_library_class(), _by_parts(batch))):
        def kernel(self, *operands: Any) -> Any:
            return _Times(super().kernel(*operands), parts)

        def load(self, *operands: Any) -> None:
            super().load(*of_part(operands))

        def mma(self, *operands: Any, **settings: Any) -> None:
            super().mma(*of_part(operands), **settings)

        def dQaccum_store(self, *operands: Any) -> None:
            super().dQaccum_store(*of_part(operands))

        def epilogue_dKV(self, *operands: Any) -> None:
            super().epilogue_dKV(*operands[:ROW], arch.block_idx()[2], *operands[ROW + 1 :])

    return InParts


def knows_rows() -> bool:
    """Tell whether the batch row is where it is looked for."""
    return list(signature(_library_class().epilogue_dKV).parameters)[1 + ROW] == "batch_idx"  # after self


def _library_class() -> Any:
    return import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90


@cache
def _by_parts(batch: int) -> Any:
    """Make the schedule of blocks of threads that take one row each, all batch rows again for each part."""
    schedule = import_module("fa4_jax.cute.tile_scheduler")

    class ByParts(schedule.SingleTileScheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            return ByParts(params, import_module("cutlass.cute").arch.block_idx(), loc=loc, ip=ip)

        def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            work = super().get_current_work(loc=loc, ip=ip)
            row, head, place, rest = work.tile_idx
            return schedule.WorkTileInfo((row, head, place % batch, rest), work.is_valid_tile)

        def __new_from_mlir_values__(self, values: Any) -> Any:
            old = super().__new_from_mlir_values__(values)
            made = ByParts(old.params, old._blk_coord, loc=old._loc)
            made._is_first_block = old._is_first_block
            return made

    return ByParts


class _Times:
    """Launch so many blocks of threads for each batch row."""

    def __init__(self, launcher: Any, parts: int) -> None:
        self.launcher, self.parts = launcher, parts

    def launch(self, *, grid: Any, **settings: Any) -> Any:
        """Launch, the grid taken so many times."""
        rows, heads, batch = grid
        return self.launcher.launch(grid=(rows, heads, batch * self.parts), **settings)
