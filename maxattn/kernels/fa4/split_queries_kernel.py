"""FlashAttention-4's Hopper backward of fa4-jax, split over the queries: split_queries.py.

A thread block goes through one split of the queries, and writes dK and dV to a batch row of its
own.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4.tile_schedulers import OnGrid, single_tile_scheduler, with_scheduler

ROW = 14  # which operand of the library's `epilogue_dKV` is the batch row


@cache
def split_class(batch: int, splits: int) -> Any:
    """Make a backward of so many batch rows whose thread blocks take a split of the queries each.

    Its dK and dV have a batch row for each of them, split by split.
    """
    ranges = import_module("fa4_jax.cute.block_info").BlockInfo
    arch = import_module("cutlass.cute").arch

    class SplitRange(ranges):
        def get_m_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            _, end = super().get_m_block_min_max(*of)
            at = arch.block_idx()[2] // batch
            return at * end // splits, (at + 1) * end // splits

    def of_split(operands: tuple[Any, ...]) -> list[Any]:
        return [SplitRange(**vars(x)) if isinstance(x, ranges) else x for x in operands]

    def again(_: Any, row: Any, head: Any, place: Any, split: Any) -> tuple[Any, ...]:
        return row, head, place % batch, split  # all batch rows, for each split

    def grid(rows: Any, heads: Any, batch: Any) -> tuple[Any, Any, Any]:
        return rows, heads, batch * splits

    class Split(with_scheduler(_library_class(), single_tile_scheduler(again))):
        def kernel(self, *operands: Any) -> Any:
            return OnGrid(super().kernel(*operands), grid)

        def load(self, *operands: Any) -> None:
            super().load(*of_split(operands))

        def mma(self, *operands: Any, **settings: Any) -> None:
            super().mma(*of_split(operands), **settings)

        def dQaccum_store(self, *operands: Any) -> None:
            super().dQaccum_store(*of_split(operands))

        def epilogue_dKV(self, *operands: Any) -> None:
            super().epilogue_dKV(*operands[:ROW], arch.block_idx()[2], *operands[ROW + 1 :])

    return Split


def knows_rows() -> bool:
    """Tell whether the batch row is where it is looked for."""
    names = list(signature(_library_class().epilogue_dKV).parameters)
    return names[1 + ROW] == "batch_idx"  # after self


def _library_class() -> Any:
    return import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90
