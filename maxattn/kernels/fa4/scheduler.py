"""The tile scheduler, loop ranges and lists of the Hopper kernels, shared by both passes.

fa4-jax starts a thread block for each tile row of a grid. Here a thread block computes a work item
(work.py), and a persistent thread block takes one item after another from a queue, a counter in
global memory. The loading warp fetches the index of the next item while the other warps multiply,
and passes the index to them through shared memory.

While a loop of the library is traced, `tile_idx` is an item's (tile row, head, batch row, 0);
ranges, lists and epilogues read the whole item from `kernel.item`.

This file needs CuTe, which comes with fa4-jax, and is imported when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from maxattn.kernels.fa4 import library
from maxattn.kernels.fa4.library import Spec
from maxattn.kernels.fa4.mask_test import Numbers
from maxattn.kernels.fa4.work import Cut

library.kernels()
cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")
arch: Any = cute.arch
scheduling: Any = import_module("fa4_jax.cute.tile_scheduler")
utils: Any = import_module("fa4_jax.cute.utils")
BlockInfo: Any = import_module("fa4_jax.cute.block_info").BlockInfo
BlockSparseTensors: Any = import_module("fa4_jax.cute.block_sparsity").BlockSparseTensors
Int32: Any = cutlass.Int32

FIRST_QUEUE_BARRIER = 13  # a thread block has 16 named barriers; the library uses them from 1 on
# Two places in shared memory are enough: the loading warp writes the index of item n + 2 over that
# of item n after it loaded the queries of item n + 1, and these wait until item n is done.
PLACES = 2


@dataclass
class Sizes(scheduling.ParamsBase):
    """A scheduler's operands: numbers of tile rows, heads and batch rows; maxattn's arrays."""

    num_block: Any
    num_head: Any
    num_batch: Any
    items: Any = None
    count: Any = None
    lists: Any = None
    lengths: Any = None
    slots: Any = None
    slot_lse: Any = None
    flags: Any = None


class Item(NamedTuple):
    """A work item inside a kernel; `first` and `last` are 0 if a formula gives the items."""

    row: Any
    lane: Any
    first: Any
    last: Any


class ItemTile(scheduling.WorkTileInfo):
    """An item as the library's work tile; reading `tile_idx` sets `kernel.item`."""

    def __init__(self, kernel: Any, item: tuple[Any, ...], is_valid: Any) -> None:
        super().__init__(item, is_valid)
        self.kernel = kernel

    @property
    def tile_idx(self) -> tuple[Any, ...]:
        self.kernel.item = Item(*self._tile_idx)
        row, lane, *_ = self._tile_idx
        heads, batch = self.kernel.sizes.num_head, lane // self.kernel.sizes.num_head
        if self.kernel.cut.tail:  # each split has its own lane numbers (work.py)
            batch = batch % self.kernel.sizes.num_batch
        return row, lane % heads, batch, Int32(0)

    def __extract_mlir_values__(self) -> list[Any]:
        return cutlass.extract_mlir_values((*self._tile_idx, self.is_valid_tile))

    def __new_from_mlir_values__(self, values: list[Any]) -> ItemTile:
        *item, valid = cutlass.new_from_mlir_values((*self._tile_idx, self.is_valid_tile), values)
        return ItemTile(self.kernel, tuple(item), valid)


class ItemScheduler(scheduling.SingleTileScheduler):
    """Return a thread block's only item, or one item after another from the queue.

    Args:
        kernel: the kernel that is traced.
        sizes: the launch's `Sizes`.
        at: (index of the item, number of items that the thread block took before).
        queue: the `Queue`; None if each item has its own thread block.
    """

    def __init__(self, kernel: Any, sizes: Any, at: tuple[Any, Any], queue: Any = None) -> None:
        super().__init__(sizes, at)
        self.kernel, self.queue = kernel, queue

    def get_current_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        queue, at = self.kernel.queue, self._blk_coord[0]
        if not queue and not self._is_first_block:
            return ItemTile(self.kernel, (Int32(0),) * 4, cutlass.Boolean(False))
        count = item_count(self.kernel.cut, self.params)
        valid = at < count if queue else cutlass.Boolean(True)
        if queue:
            at = Numbers.minimum(at, count - 1)
        return ItemTile(self.kernel, self._item(at), valid)

    def _item(self, at: Any) -> tuple[Any, ...]:
        sizes = self.params
        if sizes.items is not None:
            return tuple(sizes.items[at, n] for n in range(4))
        lanes = sizes.num_head * sizes.num_batch
        row, lane = self.kernel.cut.place(at, sizes.num_block, lanes, Numbers)
        return Int32(row), Int32(lane), Int32(0), Int32(0)

    def advance_to_next_work(self, *, loc: Any = None, ip: Any = None) -> Any:
        self._is_first_block = False
        if self.kernel.queue:
            wave = self._blk_coord[1] + 1
            self._blk_coord = self.queue.next(wave), wave
        return self.get_current_work()

    def __new_from_mlir_values__(self, values: Any) -> Any:
        old = super().__new_from_mlir_values__(values)
        made = ItemScheduler(self.kernel, old.params, old._blk_coord, self.queue)
        made._is_first_block = self._is_first_block
        return made


def item_count(cut: Cut, sizes: Any) -> Any:
    if sizes.items is not None:
        return sizes.items.shape[0]
    return cut.count(sizes.num_block, sizes.num_head * sizes.num_batch)


class OnGrid(NamedTuple):
    """Launch `blocks` thread blocks instead of the library's grid."""

    launcher: Any
    blocks: Any

    def launch(self, *, grid: Any, **settings: Any) -> Any:
        return self.launcher.launch(grid=(self.blocks, 1, 1), **settings)


class Scheduled:
    """A mixin for both kernels that replaces the library's tile scheduler, ranges and lists."""

    cut: Cut
    queue: int
    extra: dict[str, Any]  # one compilation's arrays beside the library's operands
    item: Any = None
    sizes: Any = None
    waits_for_items: bool = False

    def prepare(self, spec: Spec, **extra: Any) -> None:
        self.cut, self.queue, self.extra = spec.cut, spec.queue, extra

    def has(self, name: str) -> bool:
        return self.extra.get(name) is not None

    def kernel(self, *operands: Any) -> Any:
        given = library.NamedOperands(super().kernel, operands)  # pyright: ignore
        old = given["tile_sched_params"]
        sizes = Sizes(old.num_block, old.num_head, old.num_batch, **self.extra)
        given |= {"tile_sched_params": sizes, "TileScheduler": self}
        count = item_count(self.cut, sizes)
        if self.queue:
            count = cutlass.min(count, self.queue)
        return OnGrid(super().kernel(*given.values()), count)  # pyright: ignore

    def create(self, sizes: Any, queue: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
        """Make a scheduler, as the library's scheduler classes do."""
        self.sizes = sizes
        if self.has("lists") and self.waits_for_items:
            # This launch may begin before the launch that makes the items has ended.
            arch.griddepcontrol_wait()
        return ItemScheduler(self, sizes, (arch.block_idx()[0], Int32(0)), queue)

    def hooked(self, method: Any, operands: tuple[Any, ...], **changes: Any) -> list[Any]:
        """Return a method's operands, with the ranges and lists replaced by this kernel's."""
        given = library.NamedOperands(method, operands) | changes
        given["block_info"] = ItemRange.of(self, given["block_info"])
        if self.has("lists"):
            given["blocksparse_tensors"] = lists_of(self)
        return list(given.values())


class ItemRange(BlockInfo):
    """Limit the loop over key tiles (forward) or query tiles (backward) to the item's steps."""

    kernel: Any

    @classmethod
    def of(cls, kernel: Any, info: Any) -> ItemRange:
        made = cls(**{name: getattr(info, name) for name in type(info).__dataclass_fields__})
        object.__setattr__(made, "kernel", kernel)
        return made

    def get_n_block_min_max(self, *of: Any, **by_name: Any) -> tuple[Any, Any]:
        first, last = super().get_n_block_min_max(*of, **by_name)
        return self._bounded(first, last)

    def get_m_block_min_max(self, seqlen_info: Any, n_block: Any) -> tuple[Any, Any]:
        first, last = super().get_m_block_min_max(seqlen_info, n_block)
        if self.kernel.has("lengths"):
            # Key tiles past the length have no steps, unless the first key tile must store dQ.
            some = n_block * self.tile_n < seqlen_info.seqlen_k
            if self.kernel.has("flags"):
                some = Numbers.where(n_block == 0, 1, Numbers.where(some, 1, 0)) != 0
            last = Numbers.where(some, last, 0)
        return self._bounded(first, last)

    def _bounded(self, first: Any, last: Any) -> tuple[Any, Any]:
        kernel = self.kernel
        if kernel.has("lists") or kernel.cut.tail == 0:
            return first, last
        item, sizes = kernel.item, kernel.sizes
        lanes = sizes.num_head * sizes.num_batch
        return kernel.cut.steps(item.row, item.lane, sizes.num_block, lanes, last, Numbers)


# ---- the queue -----------------------------------------------------------------------------------


class Queue(NamedTuple):
    """Fetch the index of the next item, and pass it from the loading warp to the other warps."""

    count: Any  # int32 [1] in global memory, the items taken after each thread block's first item
    next_items: Any  # int32 [`PLACES`] in shared memory
    threads: int  # number of threads of the loading warp and the multiplying warps
    loads: bool  # whether the loading warp is traced

    def next(self, wave: Any) -> Any:
        """Return the next item's index; `wave` is how many items the thread block took before."""
        if self.loads:
            return fetch(self.count, self.next_items, wave, self.threads)
        return receive(self.next_items, wave, self.threads)


@cute.jit
def fetch(count: Any, next_items: Any, wave: Any, threads: Any):
    at = Int32(0)
    if arch.lane_idx() == 0:
        at = arch.grid_dim()[0] + utils.atomic_add_i32(1, count.iterator)
        next_items[wave % PLACES] = at
    at = arch.shuffle_sync(at, 0)
    full = FIRST_QUEUE_BARRIER + wave % PLACES
    arch.barrier_arrive(barrier_id=full, number_of_threads=threads)
    return at


@cute.jit
def receive(next_items: Any, wave: Any, threads: Any):
    full = FIRST_QUEUE_BARRIER + wave % PLACES
    arch.barrier(barrier_id=full, number_of_threads=threads)
    at = next_items[wave % PLACES]
    arch.sync_warp()  # one thread signals, for its whole warp, that the queries are free
    return at


# ---- lists ---------------------------------------------------------------------------------------


def lists_of(kernel: Any) -> Any:
    """Return the current item's lists as a replacement of the library's block-sparse tensors."""
    mixed, full = ItemList(kernel, 0), ItemList(kernel, 1)
    return BlockSparseTensors(ListCount(mixed), mixed, ListCount(full), full)


class ItemList(NamedTuple):
    """The array of the mixed (`which` 0) or full (1) tiles of the current item."""

    kernel: Any
    which: int

    @property
    def is_ranges(self) -> bool:
        return len(self.kernel.sizes.lists.shape) == 2

    def __getitem__(self, place: Any) -> Any:
        first, row = self.bounds(place)[0], self.row(place)
        if not self.is_ranges:
            return Entries(row, 1 + first)
        return Entries(None, row[2] + first) if self.which else Entries(row, 3 + first)

    def row(self, place: Any) -> Any:
        """Return the tile row's part of the lists; `place` is (batch row, head, tile row)."""
        (batch, _, row, *_), array = place, self.kernel.sizes.lists
        if self.is_ranges:
            return array[row, None]
        own = (batch,) if len(array.shape) == 4 else ()  # else all batch rows share the lists
        return array[self.which, *own, row, None]

    def bounds(self, place: Any) -> tuple[Any, Any]:
        """Return the bounds of the item's tiles in this list; its steps begin with mixed tiles."""
        mixed = self._replace(which=0).row(place)[0]
        count = self.row(place)[int(self.is_ranges)] if self.which else mixed
        if self.kernel.cut.tail == 0:
            return Int32(0), count
        before, item = (mixed if self.which else 0), self.kernel.item
        ends = (x - before for x in (item.first, item.last))
        first, last = (Numbers.maximum(Numbers.minimum(x, count), 0) for x in ends)
        return first, last


class ListCount(NamedTuple):
    """The array of the numbers of tiles in the current item's lists."""

    of: ItemList
    shape: Any = (1, 1, 1)

    def __getitem__(self, place: Any) -> Any:
        first, last = self.of.bounds(place)
        return last - first


class Entries(NamedTuple):
    """A list of tiles: `array[first:]`, or first, first + 1, ... if the array is None."""

    array: Any
    first: Any

    def __getitem__(self, n: Any) -> Any:
        return self.first + n if self.array is None else self.array[self.first + n]
