"""FlashAttention-4's Hopper kernels of fa4-jax, under tile schedulers of our own.

The library starts a thread block for each row of tiles; on an SM the next one begins when the last
has ended: it is set up, loads, multiplies, and writes its result, one after the other. Here the
forward's thread blocks can be persistent: one runs on each SM, and loads the next row while the
results of the last one are written. They are dealt their rows beforehand, or each takes the next
one as soon as it is free (dynamic_scheduler.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any

import jax

from maxattn.devices import SMS
from maxattn.kernels.fa4.cute_packages import library_backward, library_forward
from maxattn.kernels.fa4.dynamic_scheduler import place_taken, take_next, with_next_rows
from maxattn.kernels.fa4.launch_order import Order, at_wave
from maxattn.kernels.fa4.mask_mod_rows import Numbers, by_ids, by_rows

RESULT = 8  # which operand of the library's `mma` is the tile of results in shared memory
FREE_BARRIER = 15  # of the 16 that a thread block has; the library counts up from 1


@cache
def forward_class(order: Order) -> Any:
    """Make a forward that goes through its rows in this order."""
    library_class = library_forward()
    persistent = order.persistent and _knows_results(library_class)
    scheduler = _persistent_scheduler(order) if persistent else _scheduler(order)

    class Forward(with_scheduler(library_class, scheduler)):
        def load(self, *operands: Any) -> Any:
            return super().load(*self.handed(operands, loads=True))

        def mma(self, *operands: Any) -> Any:
            return super().mma(*by_rows(self.handed(operands, loads=False)))

        def handed(self, operands: tuple[Any, ...], loads: bool) -> tuple[Any, ...]:
            return with_rows(order, operands)

    if not persistent:
        return Forward
    made = _with_own_results(Forward)
    return with_next_rows(made, _handed) if order.dynamic else made


def _with_own_results(forward: Any) -> Any:
    """Make a forward whose thread blocks load a row while the result of the last is written."""
    cute = import_module("cutlass.cute")

    class Persistent(forward):
        def _get_shared_storage_cls(self) -> Any:
            # The library writes the result over Q, which the next row's Q would overwrite: it gets
            # a place of its own.
            fields = dict(super()._get_shared_storage_cls()._annotations)
            result = cute.struct.MemRange[self.dtype, cute.cosize(self.sO_layout)]
            fields["sO"] = cute.struct.Align[result, 1024]
            storage = cute.struct(type("Storage", (), {"__annotations__": fields}))
            moved = storage._offsets["sO"] - storage._offsets["sQ"]
            self.o_after_q = moved // (self.dtype.width // 8)
            return storage

        def kernel(self, *operands: Any) -> Any:
            return OnGrid(super().kernel(*operands), _one_an_sm)

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

    return Persistent


@cache
def backward_class(order: Order) -> Any:
    """Make a backward that starts its rows in this order, and takes full tiles without a test."""
    library_class = library_backward()

    class Backward(with_scheduler(library_class, _scheduler(order))):
        def load(self, *operands: Any) -> None:
            super().load(*with_rows(order, operands))

        def mma(self, *operands: Any, **settings: Any) -> None:
            super().mma(*by_ids(with_rows(order, operands)), **settings)

        def dQaccum_store(self, *operands: Any) -> None:
            super().dQaccum_store(*with_rows(order, operands))

        def mma_one_m_block(self, *operands: Any, mask_fn: Any = None, **settings: Any) -> Any:
            # With lists, what goes past the last key is in those of what is tested:
            # block_sparse_lists.py.
            tests = not self.use_block_sparsity or _tests(mask_fn)
            test = mask_fn if tests else None
            return super().mma_one_m_block(*operands, mask_fn=test, **settings)

    return Backward


def _tests(mask_fn: Any) -> bool:
    """Tell whether a kernel tests the pairs of a tile."""
    return mask_fn is not None and mask_fn.keywords.get("mask_mod") is not None


def _knows_results(library_class: Any) -> bool:
    """Tell whether the tile of results is where it is looked for."""
    return list(signature(library_class.mma).parameters)[1 + RESULT] == "sO"  # after self


# ---- tile schedulers -----------------------------------------------------------------------------


def with_scheduler(library_class: Any, scheduler: Any) -> Any:
    """Make a kernel that takes its rows from another tile scheduler than the library's."""
    library_scheduler = import_module("fa4_jax.cute.tile_scheduler").SingleTileScheduler

    class Scheduled(library_class):
        def kernel(self, *operands: Any) -> Any:
            return super().kernel(*(scheduler if x is library_scheduler else x for x in operands))

    return Scheduled


@cache
def _scheduler(order: Order) -> Any:
    """Make the tile scheduler of thread blocks that take one row each."""
    if order == Order():
        return import_module("fa4_jax.cute.tile_scheduler").SingleTileScheduler

    def place(scheduler: Any, row: Any, head: Any, batch: Any, _: Any) -> tuple[Any, ...]:
        return _place(order, scheduler, row, batch * scheduler.params.num_head + head)

    return single_tile_scheduler(place)


def single_tile_scheduler(place: Callable[..., tuple[Any, ...]]) -> Any:
    """Make a tile scheduler of thread blocks that take one row each.

    Args:
        place: (row, head, batch row, split) of what is taken, from the scheduler and the same of
            the library's.
    """
    library = import_module("fa4_jax.cute.tile_scheduler")

    class SingleTile(library.SingleTileScheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            block_idx = import_module("cutlass.cute").arch.block_idx()
            return _given_rows(SingleTile(params, block_idx, loc=loc, ip=ip), ctx)

        def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            work = super().get_current_work(loc=loc, ip=ip)
            return library.WorkTileInfo(place(self, *work.tile_idx), work.is_valid_tile)

        def __new_from_mlir_values__(self, values: Any) -> Any:
            old = super().__new_from_mlir_values__(values)
            made = SingleTile(old.params, old._blk_coord, loc=old._loc)
            made._is_first_block = old._is_first_block
            return _given_rows(made, self.rows)

    return SingleTile


@cache
def _persistent_scheduler(order: Order) -> Any:
    """Make the tile scheduler of persistent thread blocks."""
    library = import_module("fa4_jax.cute.tile_scheduler")
    arch, number = import_module("cutlass.cute").arch, import_module("cutlass").Int32
    at_of, following = (place_taken, take_next) if order.dynamic else (_place_dealt, _next_wave)

    class PersistentTile(library.SingleTileScheduler):
        @staticmethod
        def create(params: Any, ctx: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            start = arch.block_idx()[0], number(0), number(0)
            return _given_rows(PersistentTile(params, start, loc=loc, ip=ip), ctx)

        def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            at, params = at_of(self._blk_coord), self.params
            some = at < params.num_block * params.num_head * params.num_batch
            return library.WorkTileInfo(_place_at(order, self, at), some)

        def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> Any:
            self._blk_coord = following(self._blk_coord, self.rows)
            return self.get_current_work()

        def __new_from_mlir_values__(self, values: Any) -> Any:
            old = super().__new_from_mlir_values__(values)
            made = PersistentTile(old.params, old._blk_coord, loc=old._loc)
            return _given_rows(made, self.rows)

    return PersistentTile


def _place_dealt(coord: Any) -> Any:
    """Return the place in the order that a thread block has in a wave; every other goes back."""
    block, wave, _ = coord
    return at_wave(wave, block, import_module("cutlass.cute").arch.grid_dim()[0], Numbers)


def _next_wave(coord: Any, _: Any) -> tuple[Any, Any, Any]:
    block, wave, rest = coord
    return block, wave + 1, rest


def _place_at(order: Order, scheduler: Any, at: Any) -> tuple[Any, Any, Any, Any]:
    """Return what an order puts at a place among all rows of all heads."""
    rows = scheduler.params.num_block
    return _place(order, scheduler, at % rows, at // rows)


def _place(order: Order, scheduler: Any, row: Any, lane: Any) -> tuple[Any, Any, Any, Any]:
    """Return (row, head, batch row, 0) of what an order puts at (row, lane)."""
    params, zero = scheduler.params, import_module("cutlass").Int32(0)
    rows, heads = params.num_block, params.num_head
    lanes = heads * params.num_batch
    if order.listed:
        # Persistent thread blocks ask for a place past the last one, too.
        at = Numbers.minimum(lane * rows + row, rows * lanes - 1)
        named = scheduler.rows.rows if order.dynamic else scheduler.rows
        return *order.named(at, named, (rows, heads, params.num_batch), Numbers), zero
    row, lane = order.place(row, lane, rows, lanes, Numbers)
    return row, lane % heads, lane // heads, zero


def with_rows(order: Order, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hand the rows in their order to the tile scheduler among the operands of a kernel's method.

    They come with the block-sparse lists, in a field that these kernels do not read.
    """
    return _handed(operands, lambda rows, _: rows) if order.listed else operands


def _handed(operands: tuple[Any, ...], made: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    """Hand the tile scheduler what is made of the rows, and of the count of those taken."""
    sparse = import_module("fa4_jax.cute.block_sparsity").BlockSparseTensors
    sizes = import_module("fa4_jax.cute.tile_scheduler").SingleTileScheduler.Params
    lists = next(x for x in operands if isinstance(x, sparse))
    ctx = made(lists.dq_write_order, lists.dq_write_order_full)

    def given(x: Any) -> Any:
        is_scheduler = isinstance(x, partial) and any(isinstance(y, sizes) for y in x.args)
        return partial(x.func, *x.args, ctx=ctx) if is_scheduler else x

    return tuple(given(x) for x in operands)


def _given_rows(scheduler: Any, rows: Any) -> Any:
    scheduler.rows = rows
    return scheduler


def _sms() -> int:
    device = jax.devices()[0]
    return (device.core_count if device.platform == "gpu" else None) or SMS


def _one_an_sm(rows: Any, heads: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Return as many thread blocks as there are SMs, or rows where those are fewer."""
    return import_module("cutlass").min(rows * heads * batch, _sms()), 1, 1


class OnGrid:
    """Launch on another grid than the library's.

    Args:
        launcher: of the library.
        grid: from its (rows, heads, batch).
    """

    def __init__(self, launcher: Any, grid: Callable[..., tuple[Any, Any, Any]]) -> None:
        self.launcher, self.grid = launcher, grid

    def launch(self, *, grid: Any, **settings: Any) -> Any:
        """Launch."""
        return self.launcher.launch(grid=self.grid(*grid), **settings)
