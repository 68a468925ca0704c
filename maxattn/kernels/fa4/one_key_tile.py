"""FlashAttention-4's backward over keys that are one tile, such as a short text's.

    before   delta = rowsum(dout * out), the LSE in base 2
    main     dQ, scaled, in q's dtype; dK, dV of each split of the queries
    after    the sums of dK and dV over the splits

dQ is written once (one_key_tile_kernel.py). Where keys are several tiles, the library clears, adds
up and reads float32 sums of dQ, which moves twice as much memory.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Grads, Rows, with_batch_folded
from maxattn.kernels.fa4 import backward_steps
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.kernel_calls import BackwardOperands, run_before, run_one_key_tile
from maxattn.kernels.fa4.launch_few_keys import OneKeyTile, one_key_tile_launches
from maxattn.kernels.fa4.one_key_tile_kernel import knows_launch
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.split_queries import BackwardWork, tail_of
from maxattn.kernels.fa4.split_queries_kernel import knows_rows
from maxattn.kernels.fa4.tile_sizes import Dims, Tile, backward_tile, shapes_of
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks.terms import sort_terms

HEAD_LIMIT = 192  # beyond it the library has one buffer of Q


def fits(queries: Dims, keys: Dims) -> bool:
    """Tell whether the keys of a backward are one tile, for the shapes [B,T,N,H] and [B,S,K,H]."""
    of_shape = backward_steps.of_shape(queries, keys, HEAD_LIMIT)
    return of_shape and keys[1] <= tile_for(queries).keys


def takes_call(call: Call) -> bool:
    """Tell whether the backward of a call is this one, where maxattn launches the kernels.

    Args:
        call: of one device, as it is launched: with its heads folded, where that pays.
    """
    terms = sort_terms(call.mask)
    of_keys = not (terms.positions or terms.rest)
    return of_keys and call.bias is None and fits(*shapes_of(call))


def tile_for(queries: Dims) -> Tile:
    """Return the tile of such a backward."""
    return backward_tile(queries[3], queries[1])


def work_of(queries: Dims, sms: int) -> BackwardWork:
    """Return what such a backward has to do."""
    steps = -(-queries[1] // tile_for(queries).queries)
    return BackwardWork(1, queries[0] * queries[2], steps, sms)


def splits_for(queries: Dims, sms: int) -> int:
    """Choose into how many splits the queries go, so that fewer SMs wait."""
    tail = tail_of(work_of(queries, sms))
    return 1 if tail is None else tail.splits


def takes(inputs: PieceInputs) -> bool:
    """Tell whether the backward of a rectangle is this one, where maxattn launches the kernels."""
    of_keys = inputs.is_whole or inputs.has_lengths_alone
    return of_keys and fits(inputs.q.shape, inputs.k.shape) and knows_launch() and knows_rows()


def backward(inputs: PieceInputs, rows: Rows, scale: float, sms: int) -> Grads:
    """Return (dq, dk, dv) over all pairs, or over the first keys of each batch row.

    Args:
        inputs: bfloat16 or float16; `takes` holds.
        rows: of the queries.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    return with_batch_folded(partial(_backward, scale=scale, sms=sms), inputs, rows)


def _backward(inputs: PieceInputs, rows: Rows, *, scale: float, sms: int) -> Grads:
    q, lengths = inputs.q, inputs.lengths
    splits = splits_for(q.shape, sms)
    kind = OneKeyTile(q.shape[0] if splits > 1 else 0, splits, lengths is not None)
    made = one_key_tile_launches(str(q.dtype), q.shape[3], scale, tile_for(q.shape), kind)
    arrays = q, inputs.k, inputs.v, rows.out, rows.dout
    q, k, v, out, dout = (own_array(x) for x in arrays)
    delta, lse = before(made.before, (out, dout, rows.lse), made.tile)
    ends = () if lengths is None else (lengths.astype(jnp.int32),)  # pyright: ignore
    dq, dk, dv = _main(made.main, BackwardOperands(q, k, v, dout, lse, delta, None), ends, splits)
    if splits > 1:
        dk, dv = (backward_steps.summed_splits(x, q.shape[0]) for x in (dk, dv))
    return Grads(dq, dk, dv)


def before(made: Any, operands: tuple[Array, ...], tile: Tile) -> list[Array]:
    """Return delta and the LSE in base 2, in whole tiles of queries, from (out, dout, lse)."""
    lib, (b, t, n, _) = library(), operands[0].shape
    stats = jax.ShapeDtypeStruct((b, n, -(-t // tile.queries) * tile.queries), jnp.float32)
    return import_module("cutejax").call(
        run_before,
        [stats, stats],
        made,
        *operands,
        in_specs=[lib._QKV_SPEC, lib._QKV_SPEC, lib._LSE_SPEC],
        out_specs=lib._F32_SPEC,
        name="maxattn_backward_before",
    )


def _main(made: Any, given: BackwardOperands, ends: tuple[Array, ...], splits: int) -> list[Array]:
    lib, cutejax = library(), import_module("cutejax")
    k, length = given.k, cutejax.ArraySpec(assumed_align=4)
    grads = jax.ShapeDtypeStruct((splits * k.shape[0], *k.shape[1:]), k.dtype)
    return cutejax.call(
        run_one_key_tile,
        [jax.ShapeDtypeStruct(given.q.shape, given.q.dtype), grads, grads],
        made,
        given,
        ends,
        in_specs=[lib._QKV_SPEC] * 4 + [lib._F32_SPEC] * 2 + [length] * len(ends),
        out_specs=lib._QKV_SPEC,
        name="maxattn_backward_one_key_tile",
    )
