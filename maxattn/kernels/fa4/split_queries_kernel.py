"""FlashAttention-4's Hopper backward of fa4-jax whose rows of work are cut into parts:
split_queries.py.

A block of threads goes through a part of the queries, and writes dK and dV to a batch row of its
own.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4.tile_schedulers import OnGrid, one_each, scheduled

ROW = 14  # which operand of the library's `epilogue_dKV` is the batch row


@cache
def parts_class(batch: int, parts: int) -> Any:
    """Make a backward of so many batch rows whose blocks of threads take a part of the queries
    each.

    Its dK and dV have a batch row for each of them, part by part.
    """
    ranges, arch = (
        import_module("fa4_jax.cute.block_info").BlockInfo,
        import_module("cutlass.cute").arch,
    )

    class Part(ranges):
        def get_m_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            _, end = super().get_m_block_min_max(*of)
            part = arch.block_idx()[2] // batch
            return part * end // parts, (part + 1) * end // parts

    def of_part(operands: tuple[Any, ...]) -> list[Any]:
        return [Part(**vars(x)) if isinstance(x, ranges) else x for x in operands]

    def again(_: Any, row: Any, head: Any, place: Any, split: Any) -> tuple[Any, ...]:
        return row, head, place % batch, split  # all batch rows, for each part

    class InParts(scheduled(_library_class(), one_each(again))):
        def kernel(self, *operands: Any) -> Any:
            return OnGrid(
                super().kernel(*operands), lambda rows, heads, batch: (rows, heads, batch * parts)
            )

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
    return (
        list(signature(_library_class().epilogue_dKV).parameters)[1 + ROW] == "batch_idx"
    )  # after self


def _library_class() -> Any:
    return import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90
