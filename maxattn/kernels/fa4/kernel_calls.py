"""What runs while a FlashAttention-4 kernel is compiled: calls of a kernel with its operands.

`cutejax.call` hands operands over first, as the trees they were given in, and then the results, one
by one.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.launch import Launch


class BackwardOperands(NamedTuple):
    """Hold what a backward reads, and the zeros that it adds to.

    Args:
        q, k, v, dout: in the dtype of the call.
        lse: of each row, in base 2.
        delta: of each row, the sum of out * dout.
        dq: zeros, in float32; None where nothing is added up.
        dkv: zeros for dk and dv, where query heads share keys.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any
    dkv: tuple[Any, ...] = ()


class BlockOperands(NamedTuple):
    """Hold what a backward over a block of keys reads; `keys` and `before` are [2,B,S,K,H].

    Args:
        q, dout: in the dtype of the call.
        keys: K and V of the block.
        lse, delta: of each row; the LSE in base 2.
        dq: the float32 sum so far.
        before: the block's gradients so far, or nothing.
    """

    q: Any
    keys: Any
    dout: Any
    lse: Any
    delta: Any
    dq: Any
    before: tuple[Any, ...] = ()


def run_forward(
    stream: Any,
    launch: Launch,
    qkv: Any,
    lists: Any,
    arrays: Any,
    ends: Any,
    zero: Any,
    out: Any,
    lse: Any,
    *count: Any,
):
    """Launch a forward.

    Args:
        stream: of the launch.
        launch: the kernel.
        qkv, lists, arrays: what it reads.
        ends: lengths of keys, or nothing.
        zero: what the count begins as, in the same memory, or nothing.
        out, lse: the results.
        count: of the rows that persistent thread blocks took, where they are not dealt out.
    """
    settings = _settings(stream, lists, arrays) | {"mSeqUsedK": ends[0] if ends else None}
    if count:
        lists = settings["blocksparse_tensors"]
        settings["blocksparse_tensors"] = lists._replace(dq_write_order_full=count[0])
    scale = launch.scale
    if launch.kernel.score_mod is not None:  # the scale is then an operand on the GPU
        scale = import_module("cutlass").Float32(scale)
    launch.kernel(*qkv, out, lse, scale, **settings)


def run_key_splits(
    stream: Any, launch: Launch, qkv: Any, ends: Any, out: Any, lse: Any, *whole: Any
):
    """Launch a forward whose last queries are split over the keys.

    Args:
        stream: of the launch.
        launch: the kernel.
        qkv: q, k and v; where there are lengths, k and v of all batch rows in a row.
        ends: where each batch row's keys begin and how many are real, or nothing.
        out, lse: of the splits.
        whole: out and lse of all queries; nothing where all are split.
    """
    aux = import_module("fa4_jax.cute.utils").AuxData(tensors=(out, lse))
    # Where all are split, nothing is written to what stands in the place of the output.
    results = whole or (qkv[0], None)
    rows = dict(zip(("mCuSeqlensK", "mSeqUsedK"), ends, strict=False))
    launch.kernel(*qkv, *results, launch.scale, **rows, aux_data=aux, stream=stream)


def run_list_splits(
    stream: Any, launch: Launch, qkv: Any, lists: Any, arrays: Any, out: Any, lse: Any
):
    """Launch a forward over lists that are split over the keys; `out` and `lse` are of splits."""
    # Nothing is written to what stands in the place of the output.
    settings = _settings(stream, lists, (out, lse, *arrays))
    launch.kernel(*qkv, qkv[0], None, launch.scale, **settings)


def run_backward(
    stream: Any, launch: Launch, given: BackwardOperands, lists: Any, arrays: Any, *grads: Any
):
    """Launch a backward; `grads` are dq, dk and dv."""
    # dq comes in twice, as zeros and as a result: one buffer, in which the kernel adds up. Where
    # query heads share keys, dk and dv are added up in float32 likewise.
    scale = import_module("cutlass").Float32(launch.scale)
    rows = given.dout, given.lse, given.delta
    settings = _settings(stream, lists, arrays)
    launch.kernel(given.q, given.k, given.v, *rows, *grads, scale, **settings)


def run_before(stream: Any, made: Any, out: Any, dout: Any, lse: Any, delta: Any, lse2: Any):
    """Launch what stands before a backward; `delta` and the LSE in base 2 are its results."""
    scale, nothing = import_module("cutlass").Float32(made["scale"]), [None] * 6
    made["pre"](out, dout, delta, lse, lse2, *nothing, scale, stream=stream)


def run_unseen_rows(stream: Any, kernel: Any, given: Any, lse: Any, dout: Any):
    """Launch what clears rows of dout; `given` is dout before it, in its memory."""
    kernel(dout, lse, stream)


def run_one_key_tile(stream: Any, launch: Launch, given: BackwardOperands, ends: Any, *grads: Any):
    """Launch a backward over one tile of keys.

    Args:
        stream: of the launch.
        launch: the kernel.
        given: without sums.
        ends: how many keys of each batch row are real, or nothing.
        grads: dq, in the dtype of the call, dk and dv.
    """
    scale, rows = import_module("cutlass").Float32(launch.scale), given[3:6]
    settings = _settings(stream, (), ends)
    launch.kernel(given.q, given.k, given.v, *rows, *grads, scale, **settings)


def run_first_writes(
    stream: Any,
    launch: Any,
    given: BackwardOperands,
    zeros: Any,
    dq: Any,
    flags: Any,
    *grads: Any,
):
    """Launch a backward whose first tile of keys writes dQ.

    Args:
        stream: of the launch.
        launch: a `FirstWritesLaunch`.
        given: without sums.
        zeros: what the flags begin as, in the same memory.
        dq, flags: sums in float32; whether a tile of queries has those of the first tile of keys.
        grads: dk and dv; where some keys go in splits, before those of these.
    """
    scale, rows = import_module("cutlass").Float32(launch.scale), given[3:6]
    k, v, (*whole, dk, dv) = given.k, given.v, grads
    if launch.last is None:
        first = k, v, dk, dv
    else:
        last = dk.shape[1]
        start = k.shape[1] - last
        first = [_keys(x, 0, start) for x in (k, v, *whole)]
    launch.first(
        given.q, *first[:2], *rows, dq, *first[2:], scale, mdQ_semaphore=flags, stream=stream
    )
    if launch.last is not None:
        left = _keys(k, start, last), _keys(v, start, last)
        launch.last(given.q, *left, *rows, dq, dk, dv, scale, stream=stream)


def run_block(stream: Any, made: Any, key_range: Any, given: BlockOperands, dq: Any, grads: Any):
    """Launch the library's backward on a part of a block of keys; its gradients go where it is."""
    blocks = given.keys, grads
    k, v, dk, dv = (_slice_one(x, which, key_range) for x in blocks for which in (0, 1))
    rows = given.dout, given.lse, given.delta
    library()._fa4_bwd(stream, made, given.q, k, v, *rows, dq, (), dq, dk, dv)


def run_splits(
    stream: Any, made: Any, launch: Launch, given: BackwardOperands, dq: Any, *grads: Any
):
    """Launch the library's backward on all keys but the last, if any, and ours on the last.

    Ours is split over the queries.
    """
    scale = import_module("cutlass").Float32(launch.scale)
    *whole, dk_splits, dv_splits = grads
    last = dk_splits.shape[1]
    first = given.k.shape[1] - last
    rows = given.dout, given.lse, given.delta
    if whole:
        k, v, dk, dv = (_keys(x, 0, first) for x in (given.k, given.v, *whole))
        library()._fa4_bwd(stream, made, given.q, k, v, *rows, dq, (), dq, dk, dv)
    left = _keys(given.k, first, last), _keys(given.v, first, last)
    launch.kernel(given.q, *left, *rows, dq, dk_splits, dv_splits, scale, stream=stream)


def _slice_one(packed: Any, which: int, key_range: Any) -> Any:
    """Return K (0) or V (1) of a range of the keys of a block, where it stands."""
    start, end = key_range.bounds(packed.shape[2])
    return _keys(packed[which, None, None, None, None], start, end - start)


def _keys(x: Any, start: Any, length: Any) -> Any:
    """Return so many keys of [B,S,K,H], where they stand."""
    cute = import_module("cutlass.cute")
    x = cute.domain_offset((0, start, 0, 0), x)
    layout = cute.make_layout((x.shape[0], length, *x.shape[2:]), stride=x.stride)
    return cute.make_tensor(x.iterator, layout)


def _settings(stream: Any, lists: Any, arrays: Any) -> dict[str, Any]:
    aux = import_module("fa4_jax.cute.utils").AuxData(tensors=tuple(arrays) or None)
    return {"blocksparse_tensors": _block_sparse(lists), "aux_data": aux, "stream": stream}


def _block_sparse(lists: Any) -> Any:
    """Hand the lists to every head, and shared ones to every batch row: strides of 0.

    They are the four arrays of `TileLists`, or one that holds them all (`TileLists.packed`). After
    them there may be the rows in the order in which they start.
    """
    if not lists:
        return None
    tensors = import_module("fa4_jax.cute.block_sparsity").BlockSparseTensors
    parts, rows = (lists[:4], lists[4:]) if len(lists) > 2 else (_unpacked(lists[0]), lists[1:])
    found = tensors(*(_spread(x, 1 + i % 2) for i, x in enumerate(parts)))
    return found._replace(dq_write_order=rows[0]) if rows else found


def _spread(x: Any, inner: int) -> Any:
    """Give an array axes of batch rows and heads; `inner` axes are its own."""
    cute = import_module("cutlass.cute")
    # Axes that are missing are those that batch rows, or tiles, share.
    missing = 1 + inner - len(x.shape)
    shape, stride = (*(1,) * missing, *x.shape), (*(0,) * missing, *x.stride)
    layout = cute.make_layout((shape[0], 1, *shape[1:]), stride=(stride[0], 0, *stride[1:]))
    return cute.make_tensor(x.iterator, layout)


def _unpacked(packed: Any) -> list[Any]:
    """Take the four arrays of `TileLists` out of the one that holds them, where they stand."""
    cute, found = import_module("cutlass.cute"), []
    (_, *shape, entries), (half, *stride, each) = packed.shape, packed.stride
    for which in (0, 1):
        start = packed.iterator + which * half
        count = cute.make_layout(tuple(shape), stride=tuple(stride))
        tiles = cute.make_layout((*shape, entries - 1), stride=(*stride, each))
        found += [cute.make_tensor(start, count), cute.make_tensor(start + each, tiles)]
    return found
