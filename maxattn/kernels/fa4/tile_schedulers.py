"""FlashAttention-4's Hopper kernels of fa4-jax, with an order of rows of our own, and rows that
follow each other.

The library starts a block of threads for each row of tiles; on a processor the next one begins when
the last has ended: it is set up, loads, multiplies, and writes its result, one after the other.
Here the forward's blocks of threads stay, as many as there are processors, and load the next row
while the results of the last one are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import jax

from maxattn.kernels.fa4.launch_order import PROCESSORS, Order, at_turn
from maxattn.kernels.fa4.mask_mod_rows import Numbers, by_rows

RESULT = 8  # which operand of the library's `mma` is the tile of results in shared memory
FREE_BARRIER = 15  # of the 16 that a block of threads has; the library counts up from 1


@cache
def forward_class(order: Order) -> Any:
    """Make a forward that goes through its rows in this order."""
    library_class = import_module("fa4_jax.cute.flash_fwd_sm90").FlashAttentionForwardSm90
    stays = order.stays and _knows(library_class)

    class Forward(scheduled(library_class, _staying(order) if stays else _starting(order))):
        def mma(self, *operands: Any) -> Any:
            return super().mma(*by_rows(operands))

    return _with_results_apart(Forward) if stays else Forward


def _with_results_apart(forward: Any) -> Any:
    """Make a forward whose blocks of threads load a row while the result of the last is written."""
    cute = import_module("cutlass.cute")

    class Staying(forward):
        def _get_shared_storage_cls(self) -> Any:
            # The library writes the result over Q, which the next row's Q would overwrite: it gets
            # a place of its own.
            fields = dict(super()._get_shared_storage_cls()._annotations)
            result = cute.struct.MemRange[self.dtype, cute.cosize(self.sO_layout)]
            fields["sO"] = cute.struct.Align[result, 1024]
            storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
            self.o_after_q = (storage._offsets["sO"] - storage._offsets["sQ"]) // (
                self.dtype.width // 8
            )
            return storage

        def kernel(self, *operands: Any) -> Any:
            return OnGrid(super().kernel(*operands), _on_processors)

        def mma(self, *operands: Any) -> Any:
            result = operands[RESULT]
            moved = cute.make_tensor(result.iterator + self.o_after_q, result.layout)
            return super().mma(*operands[:RESULT], moved, *operands[RESULT + 1 :])

        def epilogue(self, *operands: Any) -> None:
            # The library's barrier there serves two numbers of threads in turn. A warp that is a
            # whole short row ahead of the one that writes the result would meet it in between: all
            # wait for each other once more.
            cute.arch.barrier(barrier_id=FREE_BARRIER, number_of_threads=self.num_epilogue_threads)
            super().epilogue(*operands)

    return Staying


@cache
def backward_class(order: Order) -> Any:
    """Make a backward that starts its rows in this order, and takes full tiles without a test."""
    library_class = import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90

    class Backward(scheduled(library_class, _starting(order))):
        def mma_one_m_block(self, *operands: Any, mask_fn: Any = None, **settings: Any) -> Any:
            # What goes past the last key is in the lists of what is tested: block_sparse_lists.py.
            tests = mask_fn is not None and mask_fn.keywords.get("mask_mod") is not None
            return super().mma_one_m_block(
                *operands, mask_fn=mask_fn if tests else None, **settings
            )

    return Backward


def _knows(library_class: Any) -> bool:
    """Tell whether the tile of results is where it is looked for; else each row has threads of its
    own.
    """
    return list(signature(library_class.mma).parameters)[1 + RESULT] == "sO"  # after self


# ---- schedules -----------------------------------------------------------------------------------


def scheduled(library_class: Any, schedule: Any) -> Any:
    """Make a kernel that takes its rows from another schedule than the library's."""
    one_each = import_module("fa4_jax.cute.tile_scheduler").SingleTileScheduler

    class Scheduled(library_class):
        def kernel(self, *operands: Any) -> Any:
            return super().kernel(*(schedule if x is one_each else x for x in operands))

    return Scheduled


@cache
def _starting(order: Order) -> Any:
    """Make the schedule of blocks of threads that take one row each."""
    if order == Order():
        return import_module("fa4_jax.cute.tile_scheduler").SingleTileScheduler

    def place(params: Any, row: Any, head: Any, batch: Any, _: Any) -> tuple[Any, ...]:
        return _place(order, params, row, batch * params.num_head + head)

    return one_each(place)


def one_each(place: Callable[..., tuple[Any, ...]]) -> Any:
    """Make the schedule of blocks of threads that take one row each, another one than the
    library's.

    Args:
        place: (row, head, batch row, split) of what is taken, from the schedule's sizes and the
            same of the library's.
    """
    schedule = import_module("fa4_jax.cute.tile_scheduler")

    class OneEach(schedule.SingleTileScheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            return OneEach(params, import_module("cutlass.cute").arch.block_idx(), loc=loc, ip=ip)

        def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            work = super().get_current_work(loc=loc, ip=ip)
            return schedule.WorkTileInfo(place(self.params, *work.tile_idx), work.is_valid_tile)

        def __new_from_mlir_values__(self, values: Any) -> Any:
            old = super().__new_from_mlir_values__(values)
            made = OneEach(old.params, old._blk_coord, loc=old._loc)
            made._is_first_block = old._is_first_block
            return made

    return OneEach


@cache
def _staying(order: Order) -> Any:
    """Make the schedule of blocks of threads that take one row after the other; every other round
    goes backwards.
    """
    schedule, arch = (
        import_module("fa4_jax.cute.tile_scheduler"),
        import_module("cutlass.cute").arch,
    )
    number = import_module("cutlass").Int32

    class Staying(schedule.SingleTileScheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            return Staying(params, (arch.block_idx()[0], number(0), number(0)), loc=loc, ip=ip)

        def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            (block, turn, _), blocks, rows = (
                self._blk_coord,
                arch.grid_dim()[0],
                self.params.num_block,
            )
            at = at_turn(turn, block, blocks, Numbers)
            some = at < rows * self.params.num_head * self.params.num_batch
            return schedule.WorkTileInfo(_place(order, self.params, at % rows, at // rows), some)

        def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            block, turn, rest = self._blk_coord
            self._blk_coord = (block, turn + 1, rest)
            return self.get_current_work()

        def __new_from_mlir_values__(self, values: Any) -> Any:
            old = super().__new_from_mlir_values__(values)
            return Staying(old.params, old._blk_coord, loc=old._loc)

    return Staying


def _place(order: Order, params: Any, row: Any, lane: Any) -> tuple[Any, Any, Any, Any]:
    """Return (row, head, batch row, 0) of what an order puts at (row, lane)."""
    heads, zero = params.num_head, import_module("cutlass").Int32(0)
    row, lane = order.place(row, lane, params.num_block, heads * params.num_batch, Numbers)
    return row, lane % heads, lane // heads, zero


def _processors() -> int:
    device = jax.devices()[0]
    return (device.core_count if device.platform == "gpu" else None) or PROCESSORS


def _on_processors(rows: Any, heads: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Return as many blocks of threads as there are processors, or rows where those are fewer."""
    return import_module("cutlass").min(rows * heads * batch, _processors()), 1, 1


class OnGrid:
    """Launch on another grid than the library's.

    Args:
        launcher: of the library.
        grid: from its (rows, heads, batch).
    """

    def __init__(
        self, launcher: Any, grid: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    ) -> None:
        self.launcher, self.grid = launcher, grid

    def launch(self, *, grid: Any, **settings: Any) -> Any:
        """Launch."""
        return self.launcher.launch(grid=self.grid(*grid), **settings)
