"""FlashAttention-4's Hopper backward of fa4-jax, split over the queries: split_queries.py.

A thread block goes through one split of the queries, and writes dK and dV to a batch row of its
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4.cute_packages import library_backward
from maxattn.kernels.fa4.tile_schedulers import OnGrid, single_tile_scheduler, with_scheduler

ROW = 14  # which operand of the library's `epilogue_dKV` is the batch row


@cache
def split_class(batch: int, splits: int) -> Any:
    """Make the library's backward, in splits as of `in_splits`."""
    return in_splits(library_backward(), batch, splits)


def in_splits(backward: Any, batch: int, splits: int) -> Any:
    """Make a backward of so many batch rows whose thread blocks take a split of the queries each.

    Its dK and dV have a batch row for each of them, split by split.

    Args:
        backward: a class over all pairs, whose rows start in the library's order.
        batch, splits: how many there are.
    """
    ranges = import_module("fa4_jax.cute.block_info").BlockInfo
    arch = import_module("cutlass.cute").arch

    class SplitRange(ranges):
        def get_m_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            _, end = super().get_m_block_min_max(*of)
            at = arch.block_idx()[2] // batch
            return at * end // splits, (at + 1) * end // splits

    def of_split(x: Any) -> Any:
        return SplitRange(**vars(x)) if isinstance(x, ranges) else x

    return backward_in_splits(backward, (batch, splits), of_split)


def on_split_grid(kernel_class: Any, batch: int, splits: int) -> Any:
    """Make a kernel with a thread block for each split: all batch rows, for each of them."""

    def again(_: Any, row: Any, head: Any, place: Any, split: Any) -> tuple[Any, ...]:
        return row, head, place % batch, split

    def grid(rows: Any, heads: Any, batch: Any) -> tuple[Any, Any, Any]:
        return rows, heads, batch * splits

    class OfSplits(with_scheduler(kernel_class, single_tile_scheduler(again))):
        def kernel(self, *operands: Any) -> Any:
            return OnGrid(super().kernel(*operands), grid)

    return OfSplits


def backward_in_splits(
    backward: Any, sizes: tuple[int, int], of_split: Callable[[Any], Any]
) -> Any:
    """Make a backward with a thread block for each split; `of_split` changes its operands.

    Args:
        backward: a class whose rows start in the library's order.
        sizes: batch rows and splits.
        of_split: changes an operand of a method.
    """
    arch = import_module("cutlass.cute").arch

    class Split(on_split_grid(backward, *sizes)):
        def load(self, *operands: Any) -> None:
            super().load(*map(of_split, operands))

        def mma(self, *operands: Any, **settings: Any) -> None:
            super().mma(*map(of_split, operands), **settings)

        def dQaccum_store(self, *operands: Any) -> None:
            super().dQaccum_store(*map(of_split, operands))

        def epilogue_dKV(self, *operands: Any) -> None:
            if self.qhead_per_kvhead > 1:  # added up in float32, where all splits can
                return super().epilogue_dKV(*operands)
            super().epilogue_dKV(*operands[:ROW], arch.block_idx()[2], *operands[ROW + 1 :])

    return Split


def knows_rows() -> bool:
    """Tell whether the batch row is where it is looked for."""
    names = list(signature(library_backward().epilogue_dKV).parameters)
    return names[1 + ROW] == "batch_idx"  # after self
