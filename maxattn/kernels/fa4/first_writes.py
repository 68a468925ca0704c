"""FlashAttention-4's backward over all pairs, whose first tile of keys writes dQ.

    before   delta = rowsum(dout * out), the LSE in base 2
    main     dQ in float32, which the first tile of keys writes and the others add to; dK, dV
    after    dQ, scaled, in q's dtype; the sums of dK and dV that went in splits

The library's launch before clears the float32 sums, which are twice as large as q. Beside few keys
the products take little longer than that: beside 256 keys a backward takes 0.8 of the time.
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
from maxattn.kernels.fa4 import backward_steps, one_key_tile, split_queries
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.first_writes_kernel import knows_store
from maxattn.kernels.fa4.kernel_calls import BackwardOperands, run_first_writes
from maxattn.kernels.fa4.launch import takes_splits
from maxattn.kernels.fa4.launch_few_keys import (
    FirstWritesLaunches,
    SplitKind,
    first_writes_launches,
)
from maxattn.kernels.fa4.one_key_tile import before
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.split_queries import SplitTail, joined
from maxattn.kernels.fa4.split_queries_kernel import knows_rows
from maxattn.kernels.fa4.tile_sizes import (
    Dims,
    Tile,
    narrow_tile,
    shapes_of,
    sums_width,
    whole_tile,
)
from maxattn.kernels.fused.rectangles import PieceInputs

MOST_TILES = 32  # of keys: beside more the products take so long that zeros count for nothing
# Numbers of dQ, from which on zeros take longer than to clear the flags.
LEAST = 2**21
# Numbers of dQ of a head, for each tile of keys: a thread block of few queries ends before the one
# that it waits for has written.
LEAST_OF_TILE = 3000


def fits(queries: Dims, keys: Dims) -> bool:
    """Tell whether a backward is this one, for the shapes [B,T,N,H] of q and [B,S,K,H] of k."""
    (batch, t, heads, width), tiles = queries, -(-keys[1] // tile_for(queries).keys)
    pays = t * width >= LEAST_OF_TILE * tiles and batch * t * heads * width >= LEAST
    of_shape = backward_steps.of_shape(queries, keys, backward_steps.HOPPER_LIMIT)
    return pays and tiles <= MOST_TILES and of_shape


def takes_call(call: Call) -> bool:
    """Tell whether the backward of a call is this one, where maxattn launches the kernels.

    Args:
        call: of one device, as it is launched: with its heads folded, where that pays.
    """
    whole = call.mask.is_full and call.bias is None
    return whole and fits(*shapes_of(call)) and not one_key_tile.takes_call(call)


def tile_for(queries: Dims) -> Tile:
    """Return the tile of such a backward."""
    return whole_tile(queries[3], queries[1])


def tail_for(queries: Dims, keys: Dims, sms: int) -> SplitTail | None:
    """Choose the last tiles of keys that are split over the queries; None for no such tiles."""
    if narrow_tile(queries[3], queries[1]) is not None:
        return None
    return split_queries.tail_for(queries, keys, sms)


def takes(inputs: PieceInputs) -> bool:
    """Tell whether the backward of a rectangle is this one, where maxattn launches the kernels."""
    q, k = inputs.q, inputs.k
    if not inputs.is_whole or not fits(q.shape, k.shape):
        return False
    return knows_store() and knows_rows() and takes_splits(str(q.dtype), q.shape[3])


def backward(inputs: PieceInputs, rows: Rows, scale: float, sms: int) -> Grads:
    """Return (dq, dk, dv) over all pairs from a given output and LSE.

    Args:
        inputs: bfloat16 or float16; `takes` holds.
        rows: of the queries.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    return with_batch_folded(partial(_backward, scale=scale, sms=sms), inputs, rows)


def _backward(inputs: PieceInputs, rows: Rows, *, scale: float, sms: int) -> Grads:
    arrays = inputs.q, inputs.k, inputs.v, rows.out, rows.dout
    q, k, v, out, dout = (own_array(x) for x in arrays)
    first_keys, kind = _splits_of(q.shape, k.shape, sms)
    made = first_writes_launches(str(q.dtype), q.shape[3], scale, tile_for(q.shape), kind)
    delta, lse = before(made.before, (out, dout, rows.lse), made.tile)
    given = BackwardOperands(q, k, v, dout, lse, delta, None)
    dq, *found = _main(made, given, backward_steps.grads_of(k, first_keys, kind.splits))
    of_dq = partial(backward_steps.of_sums, library()._fa4_bwd_post, made.after)
    if kind.splits == 1:
        return Grads(of_dq(dq, q), *found)
    # XLA (jax 0.11.2) would write one result of a call into another of it, and fail over the cycle.
    dq, *whole, dk, dv = jax.lax.optimization_barrier([dq, *found])
    last = [backward_steps.summed_splits(x, k.shape[0]) for x in (dk, dv)]
    return Grads(of_dq(dq, q), *joined(whole, last, first_keys))


def _splits_of(queries: Dims, keys: Dims, sms: int) -> tuple[int, SplitKind]:
    """Return how many keys are before those whose queries are split, and the splits; 0 for none."""
    tail = tail_for(queries, keys, sms)
    if tail is None:
        return 0, SplitKind()
    size = tile_for(queries).keys
    first_keys = (-(-keys[1] // size) - tail.tiles) * size
    return first_keys, SplitKind(queries[0], tail.splits, first_keys > 0)


def _main(made: FirstWritesLaunches, given: BackwardOperands, grads: list[Any]) -> list[Array]:
    """Return dQ in float32, and the gradients of keys, in arrays like `grads`."""
    lib, cutejax, q = library(), import_module("cutejax"), given.q
    batch, t, heads, head_dim = q.shape
    tiles = -(-t // made.tile.queries)
    flags = jnp.zeros((batch, heads, tiles), jnp.int32)
    sums = batch, heads, tiles * made.tile.queries * sums_width(head_dim)
    like = [jax.ShapeDtypeStruct(sums, jnp.float32), jax.ShapeDtypeStruct(flags.shape, jnp.int32)]
    number = cutejax.ArraySpec(assumed_align=4)
    dq, _, *found = cutejax.call(
        run_first_writes,
        [*like, *grads],
        made.main,
        given,
        flags,
        in_specs=[lib._QKV_SPEC] * 4 + [lib._F32_SPEC] * 2 + [number],
        out_specs=[lib._F32_SPEC, number] + [lib._QKV_SPEC] * len(grads),
        input_output_aliases={6: 1},
        name="maxattn_backward_first_writes",
    )
    return [dq, *found]
