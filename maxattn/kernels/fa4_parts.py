"""FlashAttention-4's Hopper kernels of fa4-jax whose rows of work are cut into parts: fa4_rounds.py.

A block of threads goes through a part of the keys (forward) or of the queries (backward), and writes what it found to a
batch row of its own.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4_kernels import scheduled

ROW = {"epilogue": 12, "epilogue_dKV": 14}  # which operand of the library's is the batch row


@cache
def backward_parts_class(batch: int, parts: int) -> Any:
    """Make a backward of so many batch rows whose blocks of threads take a part of the queries each.

    Its dK and dV have a batch row for each of them, part by part.
    """
    of_part = _of_part(batch, parts)

    class InParts(_parts(_library_classes()["epilogue_dKV"], batch, parts)):
        def dQaccum_store(self, *operands: Any) -> None:
            super().dQaccum_store(*of_part(operands))

        def epilogue_dKV(self, *operands: Any) -> None:
            super().epilogue_dKV(*_for_part(operands, ROW["epilogue_dKV"]))

    return InParts


@cache
def forward_parts_class(batch: int, parts: int) -> Any:
    """Make a forward of so many batch rows whose blocks of threads take a part of the keys each; results likewise."""

    class InParts(_parts(_library_classes()["epilogue"], batch, parts)):
        def epilogue(self, *operands: Any) -> None:
            super().epilogue(*_for_part(operands, ROW["epilogue"]))

    return InParts


def knows_rows() -> bool:
    """Tell whether the batch row is where it is looked for."""
    return all(
        list(signature(getattr(each, name)).parameters)[1 + ROW[name]] == "batch_idx"  # after self
        for name, each in _library_classes().items()
    )


def _library_classes() -> dict[str, Any]:
    """Return the library's kernels by what writes their results."""
    forward, backward = (import_module(f"fa4_jax.cute.flash_{way}_sm90") for way in ("fwd", "bwd"))
    return {"epilogue": forward.FlashAttentionForwardSm90, "epilogue_dKV": backward.FlashAttentionBackwardSm90}


def _parts(library_class: Any, batch: int, parts: int) -> Any:
    """Make a kernel whose blocks of threads go through a part of the other sequence each."""
    of_part = _of_part(batch, parts)

    class Parts(scheduled(library_class, _by_parts(batch))):
        def kernel(self, *operands: Any) -> Any:
            return _Times(super().kernel(*operands), parts)

        def load(self, *operands: Any) -> None:
            super().load(*of_part(operands))

        def mma(self, *operands: Any, **settings: Any) -> None:
            super().mma(*of_part(operands), **settings)

    return Parts


def _of_part(batch: int, parts: int) -> Any:
    """Make what limits the ranges of tiles, among a function's operands, to a part."""
    ranges, arch = import_module("fa4_jax.cute.block_info").BlockInfo, import_module("cutlass.cute").arch

    def cut(whole: tuple[Any, Any]) -> tuple[Any, Any]:
        part = arch.block_idx()[2] // batch
        return part * whole[1] // parts, (part + 1) * whole[1] // parts

    class Part(ranges):
        def get_m_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            return cut(super().get_m_block_min_max(*of))

        def get_n_block_min_max(self, *of: Any) -> tuple[Any, Any]:
            return cut(super().get_n_block_min_max(*of))

    return lambda operands: [Part(**vars(x)) if isinstance(x, ranges) else x for x in operands]


def _for_part(operands: tuple[Any, ...], row: int) -> list[Any]:
    """Let results go to a batch row of their own, among all rows part by part."""
    return [*operands[:row], import_module("cutlass.cute").arch.block_idx()[2], *operands[row + 1 :]]


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
