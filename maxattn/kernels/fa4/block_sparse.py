"""FlashAttention-4's Hopper kernels over block-sparse lists: empty tiles are skipped.

Full tiles are not tested. fa4-jax carries the kernels, which take such lists, and its functions do
not pass them on: here is the launch. It serves forwards over all pairs too, where persistent thread
blocks can gain, or other tiles than the library's (forward_tiles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels.base import Grads, Rows, with_batch_folded
from maxattn.kernels.fa4 import launch as fa4_launch
from maxattn.kernels.fa4 import row_orders
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.backward_steps import of_sums, summed_splits, zeros_of_keys
from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.forward_tiles import ids_persist
from maxattn.kernels.fa4.kernel_calls import BackwardOperands, run_backward, run_forward
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.score_mod import BiasAxes
from maxattn.kernels.fa4.tile_sizes import Dims, Tile, sums_width
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks.terms import KEY_PAD, QUERY_PAD

# more than any tile: the kernels look arrays up for whole tiles, past the last query and key
PAD = 256


class TilePass(NamedTuple):
    """Hold what one pass over tiles takes beside its operands.

    Args:
        tile: queries and keys at a time.
        scale: multiplies the scores.
        lists: of the tiles to visit: of keys for each tile of queries in a forward, of queries for
            each tile of keys in a backward; None for all tiles.
        test: of pairs in mixed tiles; None with no lists.
        arrays: what the test reads, int32.
        rows: of tiles in the order in which they start, int32 [3, R] of `heaviest_first`; None
            where the order is known when tracing.
        splits: of the keys in a forward, of the queries in a backward, each of which has lists of
            its own: they stand before the batch rows.
        bias: [B or 1, N or 1, T, S], added to the scores of all pairs; None for none.
    """

    tile: Tile
    scale: float
    lists: TileLists | None = None
    test: PairTest | None = None
    arrays: tuple[Array, ...] = ()
    rows: Array | None = None
    splits: int = 1
    bias: Array | None = None

    @property
    def read(self) -> tuple[Array, ...]:
        """What the kernel reads number by number, beside the lists."""
        return padded(self) if self.bias is None else (self.bias,)


def forward(
    q: Array, k: Array, v: Array, tiles: TilePass, lengths: Array | None = None
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T]).

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16, H a multiple of 8.
        tiles: that are visited.
        lengths: of the keys of each batch row, int32 [B]; None for all keys.
    """
    lib, spec = library(), spec_of(q, k, tiles, forward=True)
    lists, ends = on_device(tiles), () if lengths is None else (lengths,)
    count = (jnp.zeros(1, jnp.int32),) if spec.order.dynamic else ()
    numbers = *lists, *tiles.read, *ends, *count
    rows = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, lse, *_ = _call(
        run_forward,
        (jax.ShapeDtypeStruct(q.shape, q.dtype), rows, *(_like(x) for x in count)),
        fa4_launch.forward_launch(spec),
        (q, k, v),
        lists,
        tiles.read,
        ends,
        count,
        in_specs=[lib._QKV_SPEC] * 3 + one_by_one(*numbers),
        out_specs=[lib._QKV_SPEC, lib._LSE_SPEC, *one_by_one(*count)],
        # the number is counted up where it stands
        input_output_aliases={2 + len(numbers): 2} if count else {},
        name="maxattn_forward",
    )
    return out, lse


def whole(q: Array, k: Array, v: Array, tiles: TilePass) -> tuple[Array, Array]:
    """Return (out, lse) over all pairs, in one launch under `vmap` too."""
    return with_batch_folded(partial(forward, tiles=tiles), q, k, v)


def backward(inputs: PieceInputs, rows: Rows, tiles: TilePass) -> Grads:
    """Return (dq, dk, dv) from a given output and LSE; `tiles` are those of the backward."""
    arrays = inputs.q, inputs.k, inputs.v, rows.out, rows.dout
    q, k, v, out, dout = (own_array(x) for x in arrays)
    made = fa4_launch.backward_launches(spec_of(q, k, tiles))
    shared = q.shape[2] > k.shape[2]
    zeros_kv = tuple(_zeros(made, k) for _ in range(2)) if shared else ()
    given = BackwardOperands(q, k, v, dout, *_before(made, out, rows.lse, dout), zeros_kv)
    dq, dk, dv = _run_backward(made, given, tiles)
    if tiles.splits > 1 and not shared:
        dk, dv = (summed_splits(x, q.shape[0]) for x in (dk, dv))
    if shared:
        lib = library()
        dk = of_sums(lib._fa4_bwd_post_dk, made.dk, dk, k)
        dv = of_sums(lib._fa4_bwd_post_dv, made.dv, dv, v)
    return Grads(of_sums(library()._fa4_bwd_post, made.dq, dq, q), dk, dv)


def _run_backward(
    made: fa4_launch.BackwardLaunches, given: BackwardOperands, tiles: TilePass
) -> Any:
    """Return dq as float32 sums, and dk and dv; sums too where query heads share keys."""
    lib, shared, lists = library(), len(given.dkv), on_device(tiles)
    like = (given.dq, *(given.dkv or _of_splits(tiles.splits, given.k, given.v)))
    floats, kv_spec = 3 + shared, lib._F32_SPEC if shared else lib._QKV_SPEC
    return _call(
        run_backward,
        tuple(_like(x) for x in like),
        made.main,
        given,
        lists,
        tiles.read,
        in_specs=[lib._QKV_SPEC] * 4 + [lib._F32_SPEC] * floats + one_by_one(*lists, *tiles.read),
        out_specs=[lib._F32_SPEC, kv_spec, kv_spec],
        input_output_aliases={6: 0, 7: 1, 8: 2} if shared else {6: 0},
        name="maxattn_backward",
    )


def _of_splits(splits: int, *like: Array) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((splits * x.shape[0], *x.shape[1:]), x.dtype) for x in like]


def spec_of(q: Array, k: Array, tiles: TilePass, forward: bool = False) -> fa4_launch.LaunchSpec:
    """Say for what the kernel of a pass is compiled."""
    rows, splits = Order(), None
    if tiles.splits > 1:
        assert tiles.lists is not None
        splits = q.shape[0], tiles.splits, len(tiles.lists.mixed_count) > tiles.splits
    elif tiles.rows is not None:
        rows = _named_order(q.shape, k.shape, tiles, forward)
    else:
        rows = row_orders.of(q.shape, k.shape, tiles.lists, tiles.tile, forward)
    kind = str(q.dtype), q.shape[3], q.shape[2] // k.shape[2], float(tiles.scale)
    adds = None if tiles.bias is None else BiasAxes.of(tiles.bias.shape)
    test = tiles.test, len(tiles.read)
    return fa4_launch.LaunchSpec(*kind, tiles.tile, rows, *test, splits, adds)


def _named_order(queries: Dims, keys: Dims, tiles: TilePass, forward: bool) -> Order:
    """Say that an array names the rows in their order. Ids are taken to leave short rows."""
    assert tiles.lists is not None and tiles.test is not None and tiles.rows is not None
    work = tiles.lists.work
    if forward and not isinstance(work, jax.Array):
        return row_orders.of_named(work, np.asarray(tiles.rows), queries, keys, tiles.tile)
    takes = forward and tiles.test.has_ids and ids_persist(queries, tiles.tile)
    return Order(persistent=takes, listed=True, own_rows=work.ndim == 2, dynamic=takes)


# ---- calls ---------------------------------------------------------------------------------------


def _like(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(run: Callable[..., None], out: Any, *operands: Any, **settings: Any) -> Any:
    return import_module("cutejax").call(run, out, *operands, vmap_method="sequential", **settings)


def one_by_one(*arrays: Array) -> list[Any]:
    """Describe arrays that are read number by number: a slice may begin anywhere."""
    spec = import_module("cutejax").ArraySpec
    return [spec(assumed_align=x.dtype.itemsize) for x in arrays]


def _before(
    made: fa4_launch.BackwardLaunches, out: Array, lse: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """Return what the backward reads of each row, and zeros to add dq to.

    It reads the LSE in base 2, and the sum of out * dout.
    """
    lib, (b, t, n, h) = library(), out.shape
    padded = -(-t // made.tile.queries) * made.tile.queries
    shapes = (b, n, padded), (b, n, padded), (b, n, padded * sums_width(h))
    delta, lse2, zeros = _call(
        lib._fa4_bwd_pre,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        made.before,
        *(out, dout, lse),
        in_specs=[lib._QKV_SPEC, lib._QKV_SPEC, lib._LSE_SPEC],
        out_specs=lib._F32_SPEC,
        name="fa4_bwd_pre",
    )
    return lse2, delta, zeros


def _zeros(made: fa4_launch.BackwardLaunches, k: Array) -> Array:
    return zeros_of_keys(k, made.tile.keys)


def on_device(tiles: TilePass) -> tuple[Array, ...]:
    """Return the lists as a kernel gets them, and the rows in their order, if any."""
    lists = tiles.lists
    found = () if lists is None else (lists.packed(),) if lists.is_traced else lists
    rows = () if tiles.rows is None else (tiles.rows,)
    return tuple(jnp.asarray(x, jnp.int32) for x in (*found, *rows))


def padded(tiles: TilePass) -> tuple[Array, ...]:
    """Return the arrays of a test, with tokens past the last ones that nothing matches."""
    arrays = [x.astype(jnp.int32) for x in tiles.arrays]
    fills = [KEY_PAD] * len(arrays)
    if tiles.test is not None and tiles.test.has_ids:
        fills[-2] = QUERY_PAD
    return tuple(_with_pad(x, fill) for x, fill in zip(arrays, fills, strict=True))


def _with_pad(x: Array, fill: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, PAD)), constant_values=fill) if x.ndim > 1 else x
