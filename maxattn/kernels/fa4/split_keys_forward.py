"""FlashAttention-4's forward with the last queries split over the keys: launch and merge.

    lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) out_p

One launch computes whole tiles, in the dtype of the call, and splits of the last, in float32.
"""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.base import Result
from maxattn.kernels.fa4.alignment import ALIGNED, library
from maxattn.kernels.fa4.forward_tiles import tile_over_all
from maxattn.kernels.fa4.kernel_calls import run_key_splits
from maxattn.kernels.fa4.launch import split_keys_launch
from maxattn.kernels.fa4.split_keys import KeySplits, wide
from maxattn.kernels.fa4.split_keys_kernel import SplitGrid
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.kernels.softmax import NEG_INF


def forward(inputs: PieceInputs, scale: float, tail: KeySplits) -> Result:
    """Return (out [B,T,N,H], lse [B,N,T]) over all pairs, or all of real keys.

    Args:
        inputs: bfloat16 or float16, H a multiple of 8; of all pairs, but for lengths.
        scale: multiplies the scores.
        tail: the tiles of queries that are split over the keys.
    """
    q, tile, (b, t, n, h) = inputs.q, tile_over_all(inputs.q.shape, inputs.k.shape), inputs.q.shape
    grid = SplitGrid(-(-t // tile.queries), b * n, *tail)
    found = _launched(inputs, float(scale), tile, grid)
    # XLA (jax 0.11.2) would write one result of a call into another of it: split_queries.py.
    outs, lses, *whole = jax.lax.optimization_barrier(found)
    first = grid.first * tile.queries
    lses = _seen(lses[:, :, : t - first], inputs.lengths, tile.keys)
    last = merged(outs[:, :, : t - first, :, :h], lses)
    return joined(whole, Result(last.out.astype(q.dtype), last.lse), first)


def _launched(inputs: PieceInputs, scale: float, tile: Tile, grid: SplitGrid) -> list[Array]:
    """Return out and lse of each split, and those of the queries before, if any."""
    lib, spec, (q, k, v) = library(), import_module("cutejax").ArraySpec, operands(inputs)
    group = q.shape[2] // k.shape[-2]
    launch = split_keys_launch(str(q.dtype), q.shape[3], group, scale, tile, grid)
    ends, keys = _ends(inputs), lib._QKV_SPEC if inputs.lengths is None else lib._QKV3_SPEC
    whole = [lib._QKV_SPEC, lib._LSE_SPEC] if grid.whole else []
    return import_module("cutejax").call(
        run_key_splits,
        _results(q, tile, grid),
        launch,
        (q, k, v),
        ends,
        in_specs=[lib._QKV_SPEC, keys, keys] + [spec(assumed_align=4)] * len(ends),
        out_specs=[
            spec(static_dims=(0, 2, 3, 4), assumed_align=ALIGNED["_F32_SPEC"]),
            spec(static_dims=(0, 2, 3), assumed_align=ALIGNED["_LSE_SPEC"]),
            *whole,
        ],
        vmap_method="sequential",
        name="maxattn_forward_splits",
    )


def operands(inputs: PieceInputs) -> tuple[Array, ...]:
    """Return q, k and v; with lengths, k and v of all batch rows in a row."""
    if inputs.lengths is None:
        return inputs.q, inputs.k, inputs.v
    return inputs.q, *(x.reshape(-1, *x.shape[2:]) for x in (inputs.k, inputs.v))


def _ends(inputs: PieceInputs) -> tuple[Array, ...]:
    """Say where each batch row's keys begin, and how many are real; nothing where all are."""
    lengths, (batch, s, *_) = inputs.lengths, inputs.k.shape
    if lengths is None:
        return ()
    assert not isinstance(lengths, Pairs)
    return jnp.arange(batch + 1, dtype=jnp.int32) * s, lengths.astype(jnp.int32)


def _seen(lses: Array, lengths: Any, keys: int) -> Array:
    """Give splits that have no keys of a batch row an LSE of -inf: they computed something."""
    if lengths is None:
        return lses
    splits, tiles = len(lses), -(-lengths // keys)
    ends = jnp.arange(splits + 1)[:, None] * tiles // splits
    return jnp.where((ends[1:] > ends[:-1])[:, :, None, None], lses, NEG_INF)


def _results(q: Array, tile: Tile, grid: SplitGrid) -> list[jax.ShapeDtypeStruct]:
    (b, t, n, h), rows = q.shape, grid.tail * tile.queries
    splits = [(grid.splits, b, rows, n, wide(h)), (grid.splits, b, rows, n)]
    made = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in splits]
    if not grid.whole:
        return made
    lse = jax.ShapeDtypeStruct((b, n, t), jnp.float32)
    return [*made, jax.ShapeDtypeStruct(q.shape, q.dtype), lse]


def merged(outs: Float[Array, "P B T N H"], lses: Float[Array, "P B T N"]) -> Result:
    """Return (out, lse) over the keys of all splits; a split that has none has LSE -inf."""
    out, lse = (_of_two if len(lses) == 2 else _of_many)(outs, lses)
    return Result(out, lse.swapaxes(1, 2))


def _of_two(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Merge two splits: by one share, used once, which XLA computes in the kernel that writes."""
    # What a split without keys computed may be anything.
    first, second = jnp.where((lses == NEG_INF)[..., None], 0.0, outs)
    share = jax.nn.sigmoid(jnp.where(lses[1] == NEG_INF, NEG_INF, lses[1] - lses[0]))
    return first + share[..., None] * (second - first), jnp.logaddexp(*lses)


def _of_many(outs: Array, lses: Array) -> tuple[Array, Array]:
    # Unrolled, for XLA to fuse: it would take a sum over the first axis for a reduction.
    top = reduce(jnp.maximum, lses)
    safe = jnp.where(top == NEG_INF, 0.0, top)
    weights = [jnp.exp(lse - safe) for lse in lses]
    total = reduce(add, weights)
    shares = ((w / jnp.where(total > 0, total, 1.0))[..., None] for w in weights)
    out = reduce(add, (jnp.where(x == 0, 0.0, x * outs[p]) for p, x in enumerate(shares)))
    return out, jnp.where(total > 0, safe + jnp.log(total), NEG_INF)


def joined(whole: list[Array], last: Result, first: int) -> Result:
    """Put the results of the last queries behind those of the queries before `first`."""
    if not first:
        return last
    out, lse = whole
    put = jax.lax.dynamic_update_slice_in_dim
    both = Result(put(out, last.out, first, 1), put(lse, last.lse, first, 2))
    # Else what reads them reads what stood there before too, and XLA copies it for that.
    return jax.lax.optimization_barrier(both)
