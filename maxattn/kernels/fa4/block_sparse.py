"""FlashAttention-4's Hopper kernels over lists of tiles, of which empty ones are skipped and full
ones not tested.

fa4-jax carries the kernels, which take such lists, and its functions do not pass them on: here is
the launch. It serves forwards over all pairs too, where threads that stay can gain (tile_sizes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels.fa4 import launch as fa4_launch
from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.launch_order import Order, order_of
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.primitives import widened
from maxattn.kernels.fa4.tile_sizes import Tile, stays

# more than any tile: the kernels look arrays up for whole tiles, past the last query and key
PAD = 256


def forward(
    q: Array,
    k: Array,
    v: Array,
    lists: TileLists | None,
    test: PairTest | None,
    arrays: tuple[Array, ...],
    scale: float,
    tile: Tile,
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T]).

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16, H a multiple of 8.
        lists: of keys for each tile of queries; None for all of them.
        test: of pairs in mixed tiles; None with no lists.
        arrays: what the test reads, int32.
        scale: multiplies the scores.
        tile: that the lists are of.
    """
    lib = fa4_launch.library()
    group = q.shape[2] // k.shape[2]
    turns = order(q.shape, k.shape, lists, tile, forward=True)
    launch = fa4_launch.forward_launch(
        str(q.dtype), q.shape[3], group, test, len(arrays), float(scale), tile, turns
    )
    listed = () if lists is None else _on_device(lists)
    rows = q.shape[0], q.shape[2], q.shape[1]
    results = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(rows, jnp.float32)
    return _call(
        fa4_launch.run_forward,
        results,
        launch,
        q,
        k,
        v,
        listed,
        _padded(arrays),
        in_specs=[lib._QKV_SPEC] * 3 + [None] * (len(listed) + len(arrays)),
        out_specs=[lib._QKV_SPEC, lib._LSE_SPEC],
        name="maxattn_forward",
    )


def whole(q: Array, k: Array, v: Array, scale: float, tile: Tile) -> tuple[Array, Array]:
    """Return (out, lse) over all pairs; an axis that is mapped over becomes part of the batch, in
    one launch.
    """

    @jax.custom_batching.custom_vmap
    def run(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return forward(q, k, v, None, None, (), scale, tile)

    @run.def_vmap
    def _folded(
        size: int, mapped: tuple[bool, ...], *operands: Array
    ) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        every = [
            x if m else jnp.broadcast_to(x, (size, *x.shape))
            for x, m in zip(operands, mapped, strict=True)
        ]
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in every)
        found = whole(q, k, v, scale, tile)
        out, lse = (x.reshape(size, -1, *x.shape[1:]) for x in found)
        return (out, lse), (True, True)

    return run(q, k, v)


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    lists: TileLists,
    test: PairTest,
    arrays: tuple[Array, ...],
    scale: float,
    tile: Tile,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) from a given output and LSE; `lists` are of queries for each tile of
    keys.
    """
    lib, group, width = fa4_launch.library(), q.shape[2] // k.shape[2], q.shape[3]
    q, k, v, out, dout = (widened(x) for x in (q, k, v, out, dout))
    made = fa4_launch.backward_launches(
        str(q.dtype),
        q.shape[3],
        group,
        test,
        len(arrays),
        float(scale),
        tile,
        order(q.shape, k.shape, lists, tile),
    )
    stats = _before(made, q, out, lse, dout)
    operands = (q, k, v, dout, *stats)
    dkv = (k, v) if group == 1 else tuple(_zeros(made, k) for _ in range(2))
    sums, dk, dv = _call(
        fa4_launch.run_backward if group == 1 else fa4_launch.run_backward_groups,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (stats[2], *dkv)),
        made.main,
        *operands,
        *(() if group == 1 else dkv),
        _on_device(lists),
        _padded(arrays),
        in_specs=[lib._QKV_SPEC] * 4
        + [lib._F32_SPEC] * (3 if group == 1 else 5)
        + [None] * (4 + len(arrays)),
        out_specs=[lib._F32_SPEC] + [lib._QKV_SPEC if group == 1 else lib._F32_SPEC] * 2,
        input_output_aliases={6: 0} if group == 1 else {6: 0, 7: 1, 8: 2},
        name="maxattn_backward",
    )
    if group > 1:
        dk, dv = (
            _after(lib._fa4_bwd_post_dk, made.dk, dk, k),
            _after(lib._fa4_bwd_post_dv, made.dv, dv, v),
        )
    dq = _after(lib._fa4_bwd_post, made.dq, sums, q)
    return dq[..., :width], dk[..., :width], dv[..., :width]


def order(
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    lists: TileLists | None,
    tile: Tile,
    forward: bool = False,
) -> Order:
    """Choose the order of rows of tiles.

    Args:
        queries, keys: the shapes of q and k.
        lists: of the tiles that are visited; None for all.
        tile: their size.
        forward: where threads may stay, which the backward's cannot.
    """
    work = _even(queries[1], keys[1], tile) if lists is None else lists.work
    may_stay = forward and not isinstance(work, jax.Array) and stays(queries[3], float(work.mean()))
    return order_of(work, queries[0] * queries[2], may_stay)


def _even(queries: int, keys: int, tile: Tile) -> np.ndarray:
    """Return the tiles of each row where none is skipped."""
    return np.full(-(-queries // tile.queries), -(-keys // tile.keys))


# ---- calls ---------------------------------------------------------------------------------------


def _call(run: Callable[..., None], out: Any, *operands: Any, **settings: Any) -> Any:
    return import_module("cutejax").call(run, out, *operands, vmap_method="sequential", **settings)


def _before(
    made: fa4_launch.Backward, q: Array, out: Array, lse: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """Return what the backward reads of each row: LSE in base 2, sums of out * dout, and zeros to
    add dq to.
    """
    lib, (b, t, n, _) = fa4_launch.library(), q.shape
    padded = -(-t // made.tile.queries) * made.tile.queries
    shapes = (b, n, padded), (b, n, padded), (b, n, padded * _wide(q.shape[3]))
    delta, lse2, zeros = _call(
        lib._fa4_bwd_pre,
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        made.before,
        out,
        dout,
        lse,
        in_specs=[lib._QKV_SPEC, lib._QKV_SPEC, lib._LSE_SPEC],
        out_specs=lib._F32_SPEC,
        name="fa4_bwd_pre",
    )
    return lse2, delta, zeros


def _after(run: Callable[..., None], made: Any, sums: Array, like: Array) -> Array:
    lib = fa4_launch.library()
    out = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call(
        run,
        out,
        made,
        sums,
        in_specs=[lib._F32_SPEC],
        out_specs=lib._QKV_SPEC,
        name=run.__name__.strip("_"),
    )


def _zeros(made: fa4_launch.Backward, k: Array) -> Array:
    b, s, heads, h = k.shape
    padded = -(-s // made.tile.keys) * made.tile.keys
    return jnp.zeros((b, heads, padded * _wide(h)), jnp.float32)


def _wide(head_dim: int) -> int:
    """Round a head dim up to what the sums are stored with."""
    return -(-head_dim // 32) * 32


def _on_device(lists: TileLists) -> TileLists:
    return TileLists(*(jnp.asarray(x, jnp.int32) for x in lists))


def _padded(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(jnp.pad(x.astype(jnp.int32), ((0, 0), (0, PAD))) for x in arrays)
