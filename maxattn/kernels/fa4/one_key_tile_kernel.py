"""FlashAttention-4's Hopper backward of fa4-jax over keys that are one tile.

A tile of queries then meets all its keys in one thread block: its dQ is whole there, and is written
once, in q's dtype. The library adds dQ up in float32 in memory, as several tiles of keys need.

The warps that multiply put dQ into shared memory row by row, and the warp that would add it up in
memory copies these rows. There are two buffers: one is copied while the other is filled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4.cute_packages import library_backward
from maxattn.kernels.fa4.split_queries_kernel import in_splits

DQ = 6  # which operand of the library's `_check_type` is the type of dQ
# Which operands of the library's `mma`, after self, are what is looked for.
MMA = {
    "tiled_mma_dQ": 3,
    "sdQaccum": 17,
    "tidx": 20,
    "softmax_scale": 25,
    "SeqlenInfoCls": 27,
    "aux_data": 30,
}
STORE = {"block_info": 2, "TileSchedulerCls": 3, "SeqlenInfoCls": 4}  # and of `dQaccum_store`
BUFFERS = 2  # of dQ, as many as the library has of Q: one number names both
# Entries behind each row of a buffer, so that rows begin in other banks of shared memory, and each
# at a multiple of 16 bytes.
SPARE = 8


@cache
def one_key_tile_class(width: int, batch: int, splits: int, has_lengths: bool) -> Any:
    """Make a backward over one tile of keys, whose dQ is [B,T,N,H] in q's dtype.

    Args:
        width: H, of the arrays; the kernel may be compiled for a larger one.
        batch: rows; 0 where nothing is split.
        splits: of the queries; dK and dV have a batch row for each split of each batch row.
        has_lengths: whether the auxiliary array says how many keys of each batch row are real.
    """
    cute, floats = import_module("cutlass.cute"), import_module("cutlass").Float32

    class OneKeyTile(library_backward()):
        of: Any = None
        head_dim = width

        def _check_type(self, *types: Any) -> None:
            super()._check_type(*types[:DQ], floats, *types[DQ + 1 :])

        def _get_shared_storage_cls(self) -> Any:
            fields = dict(super()._get_shared_storage_cls()._annotations)
            # Two buffers of 16 bits take as much as one of float32.
            buffers = cute.struct.MemRange[floats, self.tile_m * (self.tile_hdim + SPARE)]
            fields["sdQaccum"] = cute.struct.Align[buffers, self.buffer_align_bytes]
            return cute.struct(type("Storage", (), {"__annotations__": fields}))

        def mma(self, *operands: Any, **settings: Any) -> None:
            self.of = {name: operands[n] for name, n in MMA.items()}
            given = _up_to_lengths(operands, self.of) if has_lengths else operands
            super().mma(*given, **settings)
            self.of = None  # of one compilation alone

        def mma_one_m_block(self, *operands: Any, is_dQ_wg: bool = True, **by_name: Any) -> Any:
            if is_dQ_wg:
                by_name |= _written(by_name["mma_dsk_fn"], by_name["mma_dsq_fn"], _writer(self))
                # The library hands its sums on here: they go nowhere.
                by_name["tdQsdQaccum"] = cute.make_rmem_tensor(4, floats)
            return super().mma_one_m_block(*operands, is_dQ_wg=is_dQ_wg, **by_name)

        def dQaccum_store(self, dq: Any, sums: Any, *others: Any) -> None:
            block_info, scheduler, seqlen_of = ((dq, sums, *others)[n] for n in STORE.values())
            tile, head, row, _ = scheduler().initial_work_tile_info().tile_idx
            seqlen = seqlen_of(row)
            ends = block_info.get_m_block_min_max(seqlen, tile)
            rows = dq[head, None, row]
            _copy_rows()(self, rows, _buffers(self, sums), *ends, seqlen.seqlen_q)

    return in_splits(OneKeyTile, batch, splits) if splits > 1 else OneKeyTile


def _up_to_lengths(operands: tuple[Any, ...], of: dict[str, Any]) -> list[Any]:
    """Return the operands of `mma` whose keys end at the length of a batch row."""
    given, aux = list(operands), import_module("fa4_jax.cute.utils").AuxData
    (lengths,) = of["aux_data"].tensors
    # The launch may begin before the one ends that writes the lengths.
    import_module("cutlass.cute").arch.griddepcontrol_wait()
    given[MMA["aux_data"]] = aux()
    given[MMA["SeqlenInfoCls"]] = lambda row: replace(
        of["SeqlenInfoCls"](row), seqlen_k=lengths[row]
    )
    return given


def _buffers(kernel: Any, sums: Any) -> Any:
    """Return the buffers [rows, H, buffers] of dQ, where the library has its float32 sums."""
    cute = import_module("cutlass.cute")
    rows, width = kernel.tile_m, kernel.tile_hdim
    pitch = width + SPARE
    layout = cute.make_layout((rows, width, BUFFERS), stride=(pitch, 1, rows * pitch))
    return cute.make_tensor(cute.recast_ptr(sums.iterator, dtype=kernel.dtype), layout)


def _writer(kernel: Any) -> Callable[[Any, Any], None]:
    """Make what puts a thread's part of dQ into a buffer."""
    store_of = import_module("fa4_jax.cute.quack.copy_utils").get_smem_store_C
    buffers, scale = _buffers(kernel, kernel.of["sdQaccum"]), kernel.of["softmax_scale"]
    store, *_ = store_of(kernel.of["tiled_mma_dQ"], buffers, kernel.of["tidx"])

    def write(acc: Any, buffer: Any) -> None:
        acc.store(acc.load() * scale)
        store(acc, dst_idx=buffer)

    return write


def _written(multiply: Any, after: Any, write: Callable[[Any, Any], None]) -> dict[str, Any]:
    """Return the library's products of dQ and of dK, in this order, with dQ written after both.

    The second waits until the first is done.
    """
    found = []

    def dq(**settings: Any) -> Any:
        found.append(multiply(**settings))
        return found[-1]

    def dk(**settings: Any) -> None:
        after(**settings)
        write(found.pop(), settings["B_idx"])

    return {"mma_dsk_fn": dq, "mma_dsq_fn": dk}


@cache
def _copy_rows() -> Any:
    """Make what copies the rows of dQ from the buffers, in one warp."""
    cute, cutlass = import_module("cutlass.cute"), import_module("cutlass")
    barriers = import_module("fa4_jax.cute.named_barrier").NamedBarrierBwd
    copy = import_module("fa4_jax.cute.quack.copy_utils").cpasync_bulk_s2g
    arch = cute.arch

    @cute.jit
    def copy_rows(kernel: Any, dq: Any, buffers: Any, first: Any, last: Any, length: Any):
        lane = arch.lane_idx()
        threads = kernel.num_threads_per_warp_group + arch.WARP_SIZE
        size = kernel.head_dim * kernel.dtype.width // 8
        for at in cutlass.range(first, last, unroll=1):
            arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_warp()
            for group in cutlass.range_constexpr(kernel.num_wg_dQ):
                empty = int(barriers.dQEmptyWG0) + group
                arch.barrier_arrive(barrier_id=empty, number_of_threads=threads)
            for group in cutlass.range_constexpr(kernel.num_wg_dQ):
                full = int(barriers.dQFullWG0) + group
                arch.barrier(barrier_id=full, number_of_threads=threads)
            for part in cutlass.range_constexpr(kernel.tile_m // arch.WARP_SIZE):
                row = part * arch.WARP_SIZE + lane
                token = at * kernel.tile_m + row
                if token < length:
                    buffer = cute.domain_offset((row, 0, (at - first) % BUFFERS), buffers)
                    copy(buffer.iterator, cute.domain_offset((token,), dq).iterator, size)
            arch.cp_async_bulk_commit_group()
        arch.cp_async_bulk_wait_group(0, read=True)

    return copy_rows


def knows_launch() -> bool:
    """Tell whether the operands of the library's methods are where they are looked for."""
    library_class = library_backward()
    types, mma, store = (
        list(signature(method).parameters)[1:]
        for method in (library_class._check_type, library_class.mma, library_class.dQaccum_store)
    )
    known = all(mma[n] == name for name, n in MMA.items())
    return known and types[DQ] == "mdQaccum_type" and all(store[n] == x for x, n in STORE.items())
