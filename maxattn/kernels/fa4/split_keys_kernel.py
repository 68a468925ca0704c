"""FlashAttention-4's Hopper forward of fa4-jax, with the last queries split over the keys.

A thread block takes a tile of queries with all keys, as ever, or a tile at the end with one split
of them. Of a split it writes the result in float32, and its log-sum-exp, to arrays beside the
output: split_keys.py merges these.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

from maxattn.kernels.fa4.cute_packages import library_forward
from maxattn.kernels.fa4.mask_mod_rows import Numbers
from maxattn.kernels.fa4.tile_schedulers import OnGrid, single_tile_scheduler, with_scheduler

# Which operands of the library's methods, after self, are what is looked for.
EPILOGUE = {
    "acc_O": 0,
    "lse": 1,
    "tiled_mma": 8,
    "tidx": 9,
    "m_block": 10,
    "head_idx": 11,
    "batch_idx": 12,
}
AUX = 23  # of `mma`


class SplitGrid(NamedTuple):
    """Say which thread block takes what: first whole tiles, head by head, then splits.

    Attributes:
        tiles: of queries.
        lanes: heads of all batch rows.
        tail: how many tiles, the last ones of each head, are split.
        splits: of their keys.
    """

    tiles: int
    lanes: int
    tail: int
    splits: int

    @property
    def first(self) -> int:
        """The first tile that is split."""
        return self.tiles - self.tail

    @property
    def whole(self) -> int:
        """How many thread blocks take all keys."""
        return self.first * self.lanes

    @property
    def blocks(self) -> int:
        """How many thread blocks there are."""
        return self.whole + self.tail * self.lanes * self.splits

    def place(self, at: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (tile, lane) of a thread block.

        Thread blocks that read the same keys are neighbours: the tiles of a head, and the heads
        that share its keys.

        Args:
            at: its number.
            xp: has `where`.
        """
        late = at - self.whole
        tile = self.first + late % self.tail
        lane = late // self.tail % self.lanes
        if not self.whole:
            return tile, lane
        splits = at >= self.whole
        tile = xp.where(splits, tile, at % self.first)
        return tile, xp.where(splits, lane, at // self.first)

    def split(self, at: Any) -> Any:
        """Return which split a thread block takes; less than 0 where it takes all keys."""
        return (at - self.whole) // (self.tail * self.lanes)

    def keys(self, at: Any, tiles: Any, xp: Any) -> tuple[Any, Any]:
        """Return the first tile of keys that a thread block takes, and the one after the last."""
        split = self.split(at)
        ends = split * tiles // self.splits, (split + 1) * tiles // self.splits
        if not self.whole:
            return ends
        splits = at >= self.whole
        return xp.where(splits, ends[0], 0), xp.where(splits, ends[1], tiles)


@cache
def split_keys_class(grid: SplitGrid) -> Any:
    """Make a forward whose thread blocks take what `grid` says.

    The results of splits are its two auxiliary arrays: [splits,B,rows,N,H] and [splits,B,rows,N].
    """
    ranges = import_module("fa4_jax.cute.block_info").BlockInfo
    arch, number = import_module("cutlass.cute").arch, import_module("cutlass").Int32

    class SplitKeys(ranges):
        def get_n_block_min_max(self, *of: Any, **by_name: Any) -> tuple[Any, Any]:
            _, end = super().get_n_block_min_max(*of, **by_name)
            return grid.keys(arch.block_idx()[0], end, Numbers)

    def of_split(operands: tuple[Any, ...]) -> list[Any]:
        return [SplitKeys(**vars(x)) if isinstance(x, ranges) else x for x in operands]

    def place(scheduler: Any, at: Any, *_: Any) -> tuple[Any, ...]:
        tile, lane = grid.place(at, Numbers)
        heads = scheduler.params.num_head
        return tile, lane % heads, lane // heads, number(0)

    class SplitForward(with_scheduler(library_forward(), single_tile_scheduler(place))):
        results: Any = None

        def kernel(self, *operands: Any) -> Any:
            return OnGrid(super().kernel(*operands), lambda *_: (grid.blocks, 1, 1))

        def load(self, *operands: Any) -> None:
            super().load(*of_split(operands))

        def mma(self, *operands: Any) -> None:
            self.results = operands[AUX].tensors
            super().mma(*of_split(operands))
            self.results = None  # of one compilation alone

        def epilogue(self, *operands: Any) -> None:
            whole = partial(super().epilogue, *operands)
            of, number = {name: operands[n] for name, n in EPILOGUE.items()}, arch.block_idx()[0]
            tile = of["m_block"] - grid.first
            split = partial(write_split, self, of, grid.split(number), tile)
            at = arch.block_idx()[0]
            _either()(at >= grid.whole, split, whole) if grid.whole else split()

    return SplitForward


def write_split(kernel: Any, of: dict[str, Any], split: Any, tile: Any) -> None:
    """Write the results of a split, in a kernel.

    Args:
        kernel: has the arrays, as `results`.
        of: what its epilogue gets, by `EPILOGUE`.
        split: its number.
        tile: of queries, among those that are split.
    """
    (out, stats), row, head = kernel.results, of["batch_idx"], of["head_idx"]
    rows = out[split, row, None, head, None], stats[split, row, None, head]
    thread = of["tiled_mma"].get_slice(of["tidx"])
    _write()(of["acc_O"], of["lse"], *rows, thread, (kernel.tile_m, kernel.tile_hdimv), tile)


@cache
def _either() -> Any:
    """Make what runs one of two functions, in a kernel."""
    cute = import_module("cutlass.cute")

    @cute.jit
    def either(first: Any, one: Any, other: Any):
        if first:
            one()
        else:
            other()

    return either


@cache
def _write() -> Any:
    """Make what writes a thread's part of a tile of results, and its log-sum-exp."""
    cute, cutlass = import_module("cutlass.cute"), import_module("cutlass")
    by_rows = import_module("fa4_jax.cute.quack.layout_utils").reshape_acc_to_mn

    @cute.jit
    def write(acc: Any, lse: Any, out: Any, stats: Any, mma: Any, sizes: Any, at: Any):
        cute.autovec_copy(acc, mma.partition_C(cute.local_tile(out, sizes, (at, 0))))
        stats = cute.local_tile(stats, sizes[:1], (at,))
        spread = cute.append(stats.layout, cute.make_layout((sizes[1],), stride=(0,)))
        rows = by_rows(mma.partition_C(cute.make_tensor(stats.iterator, spread)))
        columns = by_rows(mma.partition_C(cute.make_identity_tensor(sizes)))
        if columns[0][1] == 0:
            for m in cutlass.range_constexpr(cute.size(rows, mode=[0])):
                rows[m, 0] = lse[m]

    return write


def knows_operands() -> bool:
    """Tell whether the operands of the library's methods are where they are looked for."""
    library_class = library_forward()
    epilogue = list(signature(library_class.epilogue).parameters)[1:]
    mma = list(signature(library_class.mma).parameters)[1:]
    return all(epilogue[n] == name for name, n in EPILOGUE.items()) and mma[AUX] == "aux_data"
