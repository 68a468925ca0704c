"""FlashAttention-4's Hopper kernels as objects, and what runs while they are compiled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import jax.numpy as jnp

from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.mask_mod_rows import pair_test
from maxattn.kernels.fa4.split_queries_kernel import knows_rows, parts_class
from maxattn.kernels.fa4.tile_schedulers import backward_class, forward_class
from maxattn.kernels.fa4.tile_sizes import Tile, whole_tile

HOPPER = 90  # the architecture that these kernels are written for


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel with its scale, for the compiler; compared by identity, and made once for each
    request.
    """

    kernel: Any
    scale: float


# ---- what runs inside of a compilation -----------------------------------------------------------


def run_forward(
    stream: Any, launch: Launch, q: Any, k: Any, v: Any, lists: Any, arrays: Any, out: Any, lse: Any
):
    """Launch a forward: operands first, then results, as `cutejax.call` hands them over."""
    launch.kernel(
        q,
        k,
        v,
        out,
        lse,
        launch.scale,
        blocksparse_tensors=_sparse(lists),
        aux_data=_aux(arrays),
        stream=stream,
    )


def run_backward(
    stream: Any,
    launch: Launch,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    _zeros: Any,
    lists: Any,
    arrays: Any,
    dq: Any,
    dk: Any,
    dv: Any,
):
    """Launch a backward."""
    # dq comes in twice, as zeros and as a result: one buffer, in which the kernel adds up.
    scale = import_module("cutlass").Float32(launch.scale)
    launch.kernel(
        q,
        k,
        v,
        dout,
        lse,
        delta,
        dq,
        dk,
        dv,
        scale,
        blocksparse_tensors=_sparse(lists),
        aux_data=_aux(arrays),
        stream=stream,
    )


def run_backward_groups(
    stream: Any,
    launch: Launch,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    zeros: Any,
    _zeros_k: Any,
    _zeros_v: Any,
    lists: Any,
    arrays: Any,
    dq: Any,
    dk: Any,
    dv: Any,
):
    """Launch a backward whose dk and dv are sums."""
    # Where query heads share keys, dk and dv are added up in float32 like dq.
    run_backward(stream, launch, q, k, v, dout, lse, delta, zeros, lists, arrays, dq, dk, dv)


def run_block(
    stream: Any,
    made: Any,
    cut: Any,
    q: Any,
    keys: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    _sums: Any,
    _before: Any,
    sums: Any,
    grads: Any,
):
    """Launch the library's backward on a part of a block of keys, of [2,B,S,K,H]; its gradients go
    where it is.
    """
    k, v, dk, dv = (_cut_out(x, which, cut) for x in (keys, grads) for which in (0, 1))
    library()._fa4_bwd(stream, made, q, k, v, dout, lse, delta, sums, (), sums, dk, dv)


def run_rounds(
    stream: Any,
    made: Any,
    launch: Launch,
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    lse: Any,
    delta: Any,
    _sums: Any,
    sums: Any,
    *grads: Any,
):
    """Launch the library's backward on all keys but the last, if any, and ours on these, by parts
    of the queries.
    """
    scale = import_module("cutlass").Float32(launch.scale)
    *whole, dk_parts, dv_parts = grads
    last = dk_parts.shape[1]
    first = k.shape[1] - last

    if whole:
        before = [_keys(x, 0, first) for x in (k, v, *whole)]
        library()._fa4_bwd(
            stream, made, q, *before[:2], dout, lse, delta, sums, (), sums, *before[2:]
        )
    left = _keys(k, first, last), _keys(v, first, last)
    launch.kernel(q, *left, dout, lse, delta, sums, dk_parts, dv_parts, scale, stream=stream)


def _cut_out(packed: Any, which: int, cut: Any) -> Any:
    """Return K (0) or V (1) of a part of a block (`key_blocks.Cut`), where it stands."""
    start, end = cut.bounds(packed.shape[2])
    return _keys(packed[which, None, None, None, None], start, end - start)


def _keys(x: Any, start: Any, length: Any) -> Any:
    """Return so many keys of [B,S,K,H], where they stand."""
    cute = import_module("cutlass.cute")
    x = cute.domain_offset((0, start, 0, 0), x)
    return cute.make_tensor(
        x.iterator, cute.make_layout((x.shape[0], length, *x.shape[2:]), stride=x.stride)
    )


def _sparse(lists: Any) -> Any:
    """Hand the lists to every batch row and head: strides of 0."""
    if not lists:
        return None
    cute = import_module("cutlass.cute")

    def shared(x: Any) -> Any:
        inner = (0, 0, 1) if len(x.shape) == 1 else (0, 0, x.shape[1], 1)
        return cute.make_tensor(x.iterator, cute.make_layout((1, 1, *x.shape), stride=inner))

    return import_module("fa4_jax.cute.block_sparsity").BlockSparseTensors(
        *(shared(x) for x in lists)
    )


def _aux(arrays: tuple[Any, ...]) -> Any:
    return import_module("fa4_jax.cute.utils").AuxData(tensors=tuple(arrays) or None)


# ---- kernels -------------------------------------------------------------------------------------


def library() -> Any:
    """Return fa4-jax's own module of launches."""
    return import_module(
        "fa4_jax.kernels"
    )  # an extra: it need not be there when this module is read


def _dtype(name: str) -> Any:
    return library()._DTYPES[jnp.dtype(name)]


@lru_cache(maxsize=256)
def forward_launch(
    dtype: str,
    head_dim: int,
    group: int,
    test: PairTest | None,
    arrays: int,
    scale: float,
    tile: Tile,
    order: Order,
) -> Launch:
    """Make the forward for one kind of operands and one test, of which `arrays` arrays are read."""
    settings = library()._fwd_cfg_sm90(head_dim, head_dim, False, False)
    kernel = forward_class(order)(
        _dtype(dtype),
        head_dim,
        head_dim,
        group,
        pack_gqa=False,
        tile_m=tile.queries,
        tile_n=tile.keys,
        num_stages=2,
        num_threads=(tile.queries // 64 + 1) * 128,
        intra_wg_overlap=settings.intra_wg_overlap,
        mma_pv_is_rs=settings.mma_pv_is_rs,
        mask_mod=None if test is None else pair_test(test),
        has_aux_tensors=arrays > 0,
    )
    return Launch(kernel, scale)


def takes_parts(dtype: str, head_dim: int) -> bool:
    """Tell whether the library's kernels can be launched in parts: tiles and operands are what we
    take them for.
    """
    plan = library()._bwd_plan(_dtype(dtype), head_dim, head_dim, 1, False, False, HOPPER)
    return (
        plan.family == HOPPER
        and (plan.tile_m, plan.tile_n) == whole_tile(head_dim)
        and knows_rows()
    )


@lru_cache(maxsize=64)
def parts_launch(dtype: str, head_dim: int, scale: float, batch: int, parts: int) -> Launch:
    """Make the library's backward over all pairs, for so many parts of the queries of so many batch
    rows.
    """
    lib, kind = library(), _dtype(dtype)
    plan = lib._bwd_plan(kind, head_dim, head_dim, 1, False, False, HOPPER)
    settings = lib._sm90_bwd_kwargs(plan.sm90, False, False)
    return Launch(parts_class(batch, parts)(kind, head_dim, head_dim, 1, **settings), scale)


class Backward(NamedTuple):
    """What runs in a backward: before it, itself, and what turns sums into dq, dk and dv."""

    tile: Tile
    before: Any
    main: Launch
    dq: Any
    dk: Any
    dv: Any


@lru_cache(maxsize=256)
def backward_launches(
    dtype: str,
    head_dim: int,
    group: int,
    test: PairTest,
    arrays: int,
    scale: float,
    tile: Tile,
    order: Order,
) -> Backward:
    """Make the backward, likewise, with the settings that the library has for this tile."""
    lib, kind = library(), _dtype(dtype)
    plans = [
        lib._bwd_plan(kind, head_dim, head_dim, group, False, window, HOPPER)
        for window in (False, True)
    ]
    plan = next(p for p in plans if p.family == HOPPER and (p.tile_m, p.tile_n) == tile)
    kernel = backward_class(order)(
        kind,
        head_dim,
        head_dim,
        group,
        **lib._sm90_bwd_kwargs(plan.sm90, False, False),
        mask_mod=pair_test(test),
        has_aux_tensors=arrays > 0,
    )

    def after(name: str, which: str, by: float | None) -> Any:
        made = lib._get_bwd_post(kind, head_dim, *lib._bwd_post_params(plan, HOPPER, which))
        return lib._aux_static(name, made, by)

    before = lib._aux_static("pre", lib._get_bwd_pre(kind, head_dim, head_dim, tile.queries), scale)
    ends = after("post", "dq", scale), after("post_k", "dkv", scale), after("post_v", "dkv", None)
    return Backward(tile, before, Launch(kernel, scale), *ends)
