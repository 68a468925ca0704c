"""fa4-jax's two Hopper kernels with three hooks: the next item, where results go, how dQ is added.

`cutejax.call` traces the functions at the end of this file. The file needs CuTe, which comes with
fa4-jax, and is imported when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax.numpy as jnp

from maxattn.kernels.fa4 import library
from maxattn.kernels.fa4.library import KernelArrays, Spec
from maxattn.kernels.fa4.mask_test import bias_adder, mask_mod, tested_by_rows
from maxattn.kernels.fa4.scheduler import (
    PLACES,
    BlockSparseTensors,
    Int32,
    ItemRange,
    Queue,
    Scheduled,
    arch,
    cute,
    cutlass,
    utils,
)
from maxattn.kernels.fa4.tiles import kernel_width
from maxattn.kernels.fa4.work import ALL, Cut

copies: Any = import_module("fa4_jax.cute.quack.copy_utils")
layouts: Any = import_module("fa4_jax.cute.quack.layout_utils")
flags_in_memory: Any = import_module("fa4_jax.cute.barrier")
Barriers: Any = import_module("fa4_jax.cute.named_barrier").NamedBarrierBwd
LibraryForward: Any = import_module("fa4_jax.cute.flash_fwd_sm90").FlashAttentionForwardSm90
LibraryBackward: Any = import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90

FREE_BARRIER = 15  # the last of a thread block's named barriers; the queue uses 13 and 14


# ---- forward -------------------------------------------------------------------------------------


class HopperForward(Scheduled, LibraryForward):
    """Compute a forward; each split writes its float32 output and its LSE to its own slot."""

    def _get_shared_storage_cls(self) -> Any:
        storage = super()._get_shared_storage_cls()
        if not self.queue:
            return storage
        fields = dict(storage._annotations)
        # The library writes outputs over Q, where the next item's Q would overwrite them.
        result = cute.struct.MemRange[self.dtype, cute.cosize(self.sO_layout)]
        fields["sO"] = cute.struct.Align[result, 1024]
        # There is room after the barriers, since other fields begin at multiples of 1,024 bytes.
        barriers = {name: fields.pop(name) for name in list(fields) if "mbar" in name}
        place = {"next_items": cute.struct.MemRange[Int32, PLACES]}
        annotations = {"__annotations__": barriers | place | fields}
        made = cute.struct(type("Storage", (), annotations))
        self.after_q = {name: made._offsets[name] - made._offsets["sQ"] for name in ("sO", *place)}
        return made

    def load(self, *operands: Any) -> Any:
        return super().load(*self._hooked(super().load, operands, loads=True))

    def mma(self, *operands: Any) -> Any:
        given = library.NamedOperands(super().mma, operands)
        changes = {"AttentionMaskCls": tested_by_rows(given["AttentionMaskCls"], forward=True)}
        if self.queue:
            result = given["sO"]
            moved = result.iterator + self.after_q["sO"] // (self.dtype.width // 8)
            changes["sO"] = cute.make_tensor(moved, result.layout)
        return super().mma(*self._hooked(super().mma, operands, loads=False, **changes))

    def _hooked(self, method: Any, operands: Any, loads: bool, **changes: Any) -> list[Any]:
        if self.queue:
            given = library.NamedOperands(method, operands)
            start = cute.recast_ptr(given["sQ"].iterator, dtype=Int32)
            place = start + self.after_q["next_items"] // 4
            assert self.use_tma_Q and self.use_tma_KV, "one warp loads"
            next_items = cute.make_tensor(place, cute.make_layout((PLACES,)))
            threads = self.num_mma_threads + arch.WARP_SIZE
            make = given["TileSchedulerCls"]
            queue = Queue(make.args[0].count, next_items, threads, loads)
            changes["TileSchedulerCls"] = partial(make.func, *make.args, queue=queue)
        return self.hooked(method, operands, **changes)

    def epilogue(self, *operands: Any) -> None:
        if self.cut.tail == 0:
            if self.queue:
                # The library's epilogue uses one barrier for two numbers of threads in turn. A warp
                # that is one item ahead could arrive at the wrong use, so all warps wait here.
                threads = self.num_epilogue_threads
                arch.barrier(barrier_id=FREE_BARRIER, number_of_threads=threads)
            return super().epilogue(*operands)
        whole = partial(super().epilogue, *operands)
        split = partial(self._write_slot, library.NamedOperands(super().epilogue, operands))
        if self.cut.tail == ALL:
            return split()
        first = self.sizes.num_block - self.cut.tail
        return either(self.item.row >= first, split, whole)

    def _write_slot(self, of: dict[str, Any]) -> None:
        sizes, (row, lane, *_) = self.sizes, self.item
        head, batch = lane % sizes.num_head, lane // sizes.num_head  # batch rows of all splits
        if self.cut.tail != ALL:
            row = row - (sizes.num_block - self.cut.tail)
        slot = sizes.slots[batch, None, head, None], sizes.slot_lse[batch, head, None]
        thread = of["tiled_mma"].get_slice(of["tidx"])
        write_tile(of["acc_O"], of["lse"], *slot, thread, (self.tile_m, self.tile_hdimv), row)


@cute.jit
def either(first: Any, one: Any, other: Any):
    if first:
        one()
    else:
        other()


@cute.jit
def write_tile(acc: Any, lse: Any, out: Any, stats: Any, mma: Any, sizes: Any, at: Any):
    """Write a thread's part of a float32 tile of outputs, and the LSE of its queries."""
    cute.autovec_copy(acc, mma.partition_C(cute.local_tile(out, sizes, (at, 0))))
    stats = cute.local_tile(stats, sizes[:1], (at,))
    spread = cute.append(stats.layout, cute.make_layout((sizes[1],), stride=(0,)))
    rows = layouts.reshape_acc_to_mn(mma.partition_C(cute.make_tensor(stats.iterator, spread)))
    columns = layouts.reshape_acc_to_mn(mma.partition_C(cute.make_identity_tensor(sizes)))
    if columns[0][1] == 0:
        for m in cutlass.range_constexpr(cute.size(rows, mode=[0])):
            rows[m, 0] = lse[m]


# ---- backward ------------------------------------------------------------------------------------


class HopperBackward(Scheduled, LibraryBackward):
    """Compute a backward; each split writes dK and dV to its own batch rows of the results.

    If query heads share keys, all splits add to the same float32 sums of dK and dV.
    """

    waits_for_items = True  # the library lets this launch begin before the previous launch ends

    def load(self, *operands: Any) -> None:
        self._with_lengths(super().load, operands)

    def mma(self, *operands: Any, **settings: Any) -> None:
        masks = library.NamedOperands(super().mma, operands)["AttentionMaskCls"]
        changes = {"AttentionMaskCls": tested_by_rows(masks, forward=False)}
        self._with_lengths(super().mma, operands, settings, **changes)

    def _with_lengths(
        self, method: Any, operands: Any, settings: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        """Run a method of the library with the keys of each batch row cut to its length."""
        if self.has("lengths"):
            make = library.NamedOperands(method, operands)["SeqlenInfoCls"]
            arch.griddepcontrol_wait()  # for the launch that makes the lengths
            changes["SeqlenInfoCls"] = lambda row: replace(
                make(row), seqlen_k=self.sizes.lengths[row]
            )
        # With `is_varlen_q` the library writes zeros for the keys of an item without steps.
        varlen, self.is_varlen_q = self.is_varlen_q, self.is_varlen_q or self.has("lengths")
        method(*self.hooked(method, operands, **changes), **(settings or {}))
        self.is_varlen_q = varlen

    def mma_one_m_block(self, *operands: Any, mask_fn: Any = None, **settings: Any) -> Any:
        # Tiles that reach past the last key are listed as mixed (lists.py): full ones need no test.
        tests = mask_fn is not None and mask_fn.keywords.get("mask_mod") is not None
        mask = mask_fn if tests or not self.has("lists") else None
        return super().mma_one_m_block(*operands, mask_fn=mask, **settings)

    def dQaccum_store(self, *operands: Any) -> None:
        if not self.has("flags"):
            self._with_lengths(super().dQaccum_store, operands)
            return
        given = library.NamedOperands(super().dQaccum_store, operands)
        work = given["TileSchedulerCls"]().initial_work_tile_info()
        tile, head, batch, _ = work.tile_idx
        seqlen = given["SeqlenInfoCls"](batch)
        if self.has("lengths"):
            arch.griddepcontrol_wait()
            seqlen = replace(seqlen, seqlen_k=self.sizes.lengths[batch])
        first, last = ItemRange.of(self, given["block_info"]).get_m_block_min_max(seqlen, tile)
        sums = given["mdQaccum"][None, head, batch]
        each = cute.make_layout((self.tile_m * self.tile_hdim // self.num_wg_dQ, self.num_wg_dQ))
        memory = cute.local_tile(sums, (each,), (None,))
        flags = self.sizes.flags[batch, head, None]
        write_or_add(self, tile, flags, given["sdQaccum"], memory, first, last)

    def epilogue_dKV(self, *operands: Any) -> None:
        given = library.NamedOperands(super().epilogue_dKV, operands)
        if self.cut.tail and self.qhead_per_kvhead == 1:
            given["batch_idx"] = self.item.lane // self.sizes.num_head
        super().epilogue_dKV(*given.values())


@cute.jit
def free_buffers(groups: Any, threads: Any):
    for group in cutlass.range_constexpr(groups):
        arch.cp_async_bulk_wait_group(groups - 1 - group, read=True)
        empty = int(Barriers.dQEmptyWG0) + group
        arch.barrier_arrive(barrier_id=empty, number_of_threads=threads)


@cute.jit
def write_or_add(kernel: Any, tile: Any, flags: Any, sums: Any, memory: Any, first: Any, last: Any):
    """Store the dQ of the first key tile over what is in memory; add the dQ of other key tiles.

    The first key tile sets a flag for each query tile, and the other key tiles wait for that flag.
    They start after the first key tile, so they cannot wait forever.
    """
    lane, groups = arch.lane_idx(), kernel.num_wg_dQ
    threads = kernel.num_threads_per_warp_group + arch.WARP_SIZE
    size = kernel.tma_copy_bytes["dQ"]
    if first < last:
        free_buffers(groups, threads)
    for at in cutlass.range(first, last, unroll=1):
        flag = cute.domain_offset((at,), flags).iterator
        for group in cutlass.range_constexpr(groups):
            full = int(Barriers.dQFullWG0) + group
            arch.barrier(barrier_id=full, number_of_threads=threads)
            ours, theirs = sums[None, group].iterator, memory[(None, group), at].iterator
            if tile == 0:
                with arch.elect_one():
                    copies.cpasync_bulk_s2g(ours, theirs, size)
            else:
                if cutlass.const_expr(group == 0):
                    flags_in_memory.wait_eq(flag, lane, 0, 1)
                    arch.sync_warp()
                    arch.fence_proxy("async.global")  # orders bulk copies after the flag
                with arch.elect_one():
                    copies.cpasync_reduce_bulk_add_f32(ours, theirs, size)
            arch.cp_async_bulk_commit_group()
        if at + 1 < last:
            free_buffers(groups, threads)
        if tile == 0:
            # The copy has read its buffer; the flag must wait until dQ is written to memory.
            arch.cp_async_bulk_wait_group(0, read=False)
            arch.sync_warp()
            flags_in_memory.arrive_inc(flag, lane, 0, 1)
    arch.cp_async_bulk_wait_group(0, read=True)


# ---- the functions that `cutejax.call` traces ----------------------------------------------------
# They get the stream, static settings, the operands and the results.


def number_of(spec: Spec) -> Any:
    return library.kernels()._DTYPES[jnp.dtype(spec.dtype)]


def settings_of(spec: Spec, arrays: Any) -> dict[str, Any]:
    """Return the library's settings for the test of pairs, or for the bias."""
    if spec.bias is not None:
        return {"score_mod": bias_adder(*spec.bias), "has_aux_tensors": True}
    test = None if spec.test is None else mask_mod(spec.test)
    return {"mask_mod": test, "has_aux_tensors": bool(arrays)}


def run_forward(stream: Any, spec: Spec, given: KernelArrays, results: KernelArrays):
    tile, config = spec.tile, library.kernels()._fwd_cfg_sm90(*(spec.head_dim,) * 2, False, False)
    kernel: Any = HopperForward(
        number_of(spec),  # pyright: ignore[reportCallIssue]
        *(spec.head_dim, spec.head_dim, spec.group),
        pack_gqa=False,
        tile_m=tile[0],
        tile_n=tile[1],
        num_stages=2,
        num_threads=(tile[0] // 64 + 1) * 128,
        intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs,
        **settings_of(spec, given.arrays),
    )
    more = {name: getattr(results, name) for name in ("count", "slots", "slot_lse")}
    kernel.prepare(spec, items=given.items, lists=given.lists, **more)
    scale = spec.scale if spec.bias is None else cutlass.Float32(spec.scale)
    out = given.q if results.out is None else results.out  # not written if all splits have slots
    arrays = given.q, given.k, given.v, out, results.lse
    kernel(*arrays, scale, mSeqUsedK=given.lengths, **_more(stream, given))


def run_backward(stream: Any, spec: Spec, given: KernelArrays, results: KernelArrays):
    """Launch a backward's kernel, or two kernels if only the last key tiles are split."""
    if spec.cut.tail in (0, ALL):
        _backward(stream, spec, given, results)
        return
    length = results.last_dk.shape[1]
    start = given.k.shape[1] - length
    k, v, dk, dv = (_keys(x, 0, start) for x in (given.k, given.v, results.dk, results.dv))
    first, grads = given._replace(k=k, v=v), results._replace(dk=dk, dv=dv)
    _backward(stream, replace(spec, cut=Cut()), first, grads)
    k, v = (_keys(x, start, length) for x in (given.k, given.v))
    last = given._replace(k=k, v=v)
    grads = results._replace(flags=None, dk=results.last_dk, dv=results.last_dv)
    _backward(stream, replace(spec, cut=Cut(ALL, spec.cut.splits)), last, grads)


def run_block(stream: Any, spec: Spec, span: Any, given: KernelArrays, results: KernelArrays):
    """Launch a backward on a range of keys of a block; the packed arrays are [2,B,S,K,H]."""
    start, end = span.bounds(given.block.shape[2])
    packed = (
        x[which, None, None, None, None] for x in (given.block, results.grads) for which in (0, 1)
    )
    k, v, dk, dv = (_keys(x, start, end - start) for x in packed)
    _backward(stream, spec, given._replace(k=k, v=v), results._replace(dk=dk, dv=dv))


def _backward(stream: Any, spec: Spec, given: KernelArrays, results: KernelArrays) -> None:
    width = kernel_width(spec.head_dim)
    kernel = HopperBackward(
        number_of(spec),  # pyright: ignore[reportCallIssue]
        *(width, width, spec.group),
        **library.kernels()._sm90_bwd_kwargs(backward_config(spec), False, False),
        **settings_of(spec, given.arrays),
    )
    more = {"lengths": given.lengths, "flags": results.flags}
    kernel.prepare(spec, items=given.items, lists=given.lists, **more)
    operands = given.q, given.k, given.v, given.dout, given.lse2, given.delta
    grads, scale = (results.dq, results.dk, results.dv), cutlass.Float32(spec.scale)
    kernel(*operands, *grads, scale, **_more(stream, given))


def _more(stream: Any, given: KernelArrays) -> dict[str, Any]:
    """Return the library's operands for lists of tiles and the test's arrays, and the stream."""
    sparse = None if given.lists is None else BlockSparseTensors(given.lists, given.lists)
    aux = utils.AuxData(tensors=tuple(given.arrays) or None)
    return {"blocksparse_tensors": sparse, "aux_data": aux, "stream": stream}


def backward_config(spec: Spec) -> Any:
    """Return the library's settings of a backward for a tile.

    At head dims from 65 to 128 the library has tiles of 64 queries only for windows, so this
    function asks for a window's settings. Up to 64, such a tile has the settings of head dim 96.
    """
    (queries, keys), width = spec.tile, kernel_width(spec.head_dim)
    width = 96 if width <= 64 and queries == 64 else width
    config = library.kernels()._bwd_cfg_sm90(width, width, False, queries == 64)
    assert (config.tile_m, config.tile_n) == (queries, keys), (config, spec.tile)
    return config


def run_before(stream: Any, spec: Spec, given: KernelArrays, results: KernelArrays):
    """Launch the kernel before a backward: delta, the LSE in base 2, and zeros for dQ, if any."""
    width, stats = kernel_width(spec.head_dim), (given.lse, results.lse2, results.dq)
    kernel = library.kernels()._get_bwd_pre(number_of(spec), width, spec.head_dim, spec.tile[0])
    nothing, scale = [None] * 5, cutlass.Float32(spec.scale)
    kernel(given.out, given.dout, results.delta, *stats, *nothing, scale, stream=stream)


def run_after(
    stream: Any, spec: Spec, which: str, scale: float, given: KernelArrays, results: KernelArrays
):
    """Launch the kernel after a backward: float32 sums of "dq" or "dkv" become a gradient."""
    lib, config = library.kernels(), backward_config(spec)
    plan = lib._BwdPlan(library.HOPPER, *spec.tile, sm90=config)
    layout = lib._bwd_post_params(plan, library.HOPPER, which)
    kernel = lib._get_bwd_post(number_of(spec), kernel_width(spec.head_dim), *layout)
    kernel(given.sums, results.grad, cutlass.Float32(scale), None, None, None, stream=stream)


def _keys(x: Any, start: Any, length: Any) -> Any:
    """Return a view of a range of keys of an array [B,S,K,H]."""
    x = cute.domain_offset((0, start, 0, 0), x)
    layout = cute.make_layout((x.shape[0], length, *x.shape[2:]), stride=x.stride)
    return cute.make_tensor(x.iterator, layout)
