"""FlashAttention-4's Hopper backward of fa4-jax, whose first tile of keys writes dQ.

The library adds the dQ of every tile of keys to float32 sums, which a launch before it has cleared.
Here the thread block of the first tile of keys writes its dQ over whatever stands there, and says
so by a flag for each tile of queries; those of other tiles wait for the flag and add theirs. They
have larger numbers, so a GPU starts them later: what they wait for is running or done.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from maxattn.kernels.fa4.cute_packages import library_backward
from maxattn.kernels.fa4.split_queries_kernel import in_splits

STORE = (
    "mdQaccum",
    "sdQaccum",
    "block_info",
    "TileSchedulerCls",
    "SeqlenInfoCls",
    "blocksparse_tensors",
    "mdQ_semaphore",
)


@cache
def first_writes_class(batch: int, splits: int) -> Any:
    """Make a backward over all pairs; its flags, int32 [B,N,tiles of queries], begin as 0.

    Args:
        batch: rows; 0 where nothing is split.
        splits: of the queries; dK and dV have a batch row for each split of each batch row.
    """

    class FirstWrites(library_backward()):
        def dQaccum_store(self, *operands: Any) -> None:
            dq, sums, block_info, scheduler, seqlen_of, _, flags = operands
            tile, head, row, _ = scheduler().initial_work_tile_info().tile_idx
            ends = block_info.get_m_block_min_max(seqlen_of(row), tile)
            memory = _by_tiles(self, dq[None, head, row])
            _store()(self, tile, flags[row, head, None], sums, memory, *ends)

    return in_splits(FirstWrites, batch, splits) if splits > 1 else FirstWrites


def _by_tiles(kernel: Any, dq: Any) -> Any:
    """Divide the sums of a head into those of each tile of queries, for each warp group."""
    cute, groups = import_module("cutlass.cute"), kernel.num_wg_dQ
    tile = cute.make_layout((kernel.tile_m * kernel.tile_hdim // groups, groups))
    return cute.local_tile(dq, (tile,), (None,))


@cache
def _store() -> Any:
    """Make what writes or adds up the dQ of a tile of keys, in one warp."""
    cute, cutlass = import_module("cutlass.cute"), import_module("cutlass")
    barriers = import_module("fa4_jax.cute.named_barrier").NamedBarrierBwd
    copies = import_module("fa4_jax.cute.quack.copy_utils")
    flag_of, arch = import_module("fa4_jax.cute.barrier"), cute.arch

    @cute.jit
    def free_buffers(groups: Any, threads: Any):
        for group in cutlass.range_constexpr(groups):
            arch.cp_async_bulk_wait_group(groups - 1 - group, read=True)
            empty = int(barriers.dQEmptyWG0) + group
            arch.barrier_arrive(barrier_id=empty, number_of_threads=threads)

    @cute.jit
    def store(kernel: Any, tile: Any, flags: Any, sums: Any, memory: Any, first: Any, last: Any):
        lane, groups = arch.lane_idx(), kernel.num_wg_dQ
        threads = kernel.num_threads_per_warp_group + arch.WARP_SIZE
        size = kernel.tma_copy_bytes["dQ"]
        free_buffers(groups, threads)
        for at in cutlass.range(first, last, unroll=1):
            flag = cute.domain_offset((at,), flags).iterator
            for group in cutlass.range_constexpr(groups):
                full = int(barriers.dQFullWG0) + group
                arch.barrier(barrier_id=full, number_of_threads=threads)
                ours, theirs = sums[None, group].iterator, memory[(None, group), at].iterator
                if tile == 0:
                    with arch.elect_one():
                        copies.cpasync_bulk_s2g(ours, theirs, size)
                else:
                    if cutlass.const_expr(group == 0):
                        flag_of.wait_eq(flag, lane, 0, 1)
                        arch.sync_warp()
                        arch.fence_proxy("async.global")  # bulk copies come after the flag too
                    with arch.elect_one():
                        copies.cpasync_reduce_bulk_add_f32(ours, theirs, size)
                arch.cp_async_bulk_commit_group()
            if at + 1 < last:
                free_buffers(groups, threads)
            if tile == 0:
                # The buffers are read by now; the flag waits until the numbers stand in memory.
                arch.cp_async_bulk_wait_group(0, read=False)
                arch.sync_warp()
                flag_of.arrive_inc(flag, lane, 0, 1)
        arch.cp_async_bulk_wait_group(0, read=True)

    return store


def knows_store() -> bool:
    """Tell whether the library's method that adds dQ up has the operands that are expected."""
    return tuple(signature(library_backward().dQaccum_store).parameters)[1:] == STORE
