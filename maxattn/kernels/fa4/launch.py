"""FlashAttention-4's Hopper kernels as objects, made once for each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.cute_packages import library_backward, library_forward
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.mask_mod import PairTest
from maxattn.kernels.fa4.mask_mod_rows import pair_test
from maxattn.kernels.fa4.score_mod import BiasAxes, bias_adder
from maxattn.kernels.fa4.split_keys_kernel import SplitGrid, split_keys_class
from maxattn.kernels.fa4.split_lists_kernel import split_lists_backward, split_lists_forward
from maxattn.kernels.fa4.split_queries_kernel import knows_rows, split_class
from maxattn.kernels.fa4.tile_schedulers import backward_class, forward_class
from maxattn.kernels.fa4.tile_sizes import SHORT_BACKWARD, Tile, kernel_width, whole_tile

HOPPER = 90  # the architecture that these kernels are written for


@dataclass(frozen=True, eq=False)
class Launch:
    """Hold a kernel with its scale, for the compiler; compared by identity."""

    kernel: Any
    scale: float


class LaunchSpec(NamedTuple):
    """Say for what a kernel is compiled.

    Args:
        dtype, head_dim: of q, k and v.
        group: query heads of each key head.
        scale: multiplies the scores.
        tile: queries and keys at a time.
        order: in which rows of tiles are started.
        test: of pairs in mixed tiles; None where no pair is tested.
        arrays: how many arrays the test, or the sum with a bias, reads.
        splits: batch rows, splits of each list of tiles, and whether batch rows have lists
            of their own; None for one split.
        adds: the axes of a bias that is added; None for none. No pair is tested beside one.
    """

    dtype: str
    head_dim: int
    group: int
    scale: float
    tile: Tile
    order: Order
    test: PairTest | None
    arrays: int
    splits: tuple[int, int, bool] | None = None
    adds: BiasAxes | None = None

    @property
    def tested(self) -> dict[str, Any]:
        """The settings of the library's kernels for the test, or for the bias."""
        if self.adds is not None:
            return {"score_mod": bias_adder(self.adds), "has_aux_tensors": True}
        test = None if self.test is None else pair_test(self.test)
        return {"mask_mod": test, "has_aux_tensors": self.arrays > 0}

    @property
    def operands(self) -> tuple[Any, int, int, int]:
        """What the library's forward is first made from: dtype, head dims, group."""
        return _dtype(self.dtype), self.head_dim, self.head_dim, self.group

    @property
    def backward_operands(self) -> tuple[Any, int, int, int]:
        """What the library's backward is first made from."""
        width = kernel_width(self.head_dim)
        return _dtype(self.dtype), width, width, self.group


def _dtype(name: str) -> Any:
    return library()._DTYPES[jnp.dtype(name)]


@lru_cache(maxsize=256)
def forward_launch(spec: LaunchSpec) -> Launch:
    """Make the forward for one kind of operands and one test."""
    # With a bias under its own tile scheduler.
    kernel = forward_class(spec.order) if spec.adds is None else library_forward()
    if spec.splits is not None:
        kernel = split_lists_forward(kernel, *spec.splits)
    return Launch(_forward(kernel, spec), spec.scale)


@lru_cache(maxsize=256)
def split_keys_launch(
    dtype: str, head_dim: int, group: int, scale: float, tile: Tile, grid: SplitGrid
) -> Launch:
    """Make the forward over all pairs whose last queries are split over the keys."""
    spec = LaunchSpec(dtype, head_dim, group, scale, tile, Order(), None, arrays=0)
    return Launch(_forward(split_keys_class(grid), spec), scale)


def _forward(kernel: Any, spec: LaunchSpec) -> Any:
    settings = library()._fwd_cfg_sm90(spec.head_dim, spec.head_dim, False, False)
    return kernel(
        *spec.operands,
        pack_gqa=False,
        tile_m=spec.tile.queries,
        tile_n=spec.tile.keys,
        num_stages=2,
        num_threads=(spec.tile.queries // 64 + 1) * 128,
        intra_wg_overlap=settings.intra_wg_overlap,
        mma_pv_is_rs=settings.mma_pv_is_rs,
        **spec.tested,
    )


class BackwardLaunches(NamedTuple):
    """Hold what runs in a backward: before it, itself, and what turns sums into dq, dk and dv."""

    tile: Tile
    before: Any
    main: Launch
    dq: Any
    dk: Any
    dv: Any


@lru_cache(maxsize=256)
def backward_launches(spec: LaunchSpec) -> BackwardLaunches:
    """Make the backward, likewise, with the settings that the library has for this tile."""
    lib, plan, scale = library(), plan_of(spec), spec.scale
    settings = lib._sm90_bwd_kwargs(plan.sm90, False, False)
    # The library hides what stands past the last key by itself.
    kernel_class = backward_class(spec.order) if spec.adds is None else library_backward()
    if spec.splits is not None:
        kernel_class = split_lists_backward(kernel_class, *spec.splits)
    kernel = kernel_class(*spec.backward_operands, **settings, **spec.tested)
    after = partial(after_backward, spec, plan)
    ends = after("post", "dq", scale), after("post_k", "dkv", scale), after("post_v", "dkv", None)
    return BackwardLaunches(spec.tile, before_backward(spec), Launch(kernel, scale), *ends)


def plan_of(spec: LaunchSpec) -> Any:
    """Return the library's plan of a backward on this tile."""
    of_window = partial(library()._bwd_plan, *spec.backward_operands, False)
    plans = [of_window(window, HOPPER) for window in (False, True)]
    if spec.head_dim <= 64 and spec.tile == SHORT_BACKWARD:
        # The library has this tile for longer heads, with settings that fit these.
        settings = library()._bwd_cfg_sm90(96, 96, False, False)
        plans = [replace(plans[0], tile_m=settings.tile_m, sm90=settings)]
    fits = (p for p in plans if p.family == HOPPER and (p.tile_m, p.tile_n) == spec.tile)
    return next(fits)


def before_backward(spec: LaunchSpec) -> Any:
    """Make what prepares the rows for a backward."""
    lib, (kind, width, *_) = library(), spec.backward_operands
    made = lib._get_bwd_pre(kind, width, spec.head_dim, spec.tile.queries)
    return lib._aux_static("pre", made, spec.scale)


def after_backward(spec: LaunchSpec, plan: Any, name: str, which: str, scale: float | None) -> Any:
    """Make what turns the float32 sums of `which`, "dq" or "dkv", into a gradient."""
    lib, (kind, width, *_) = library(), spec.backward_operands
    made = lib._get_bwd_post(kind, width, *lib._bwd_post_params(plan, HOPPER, which))
    return lib._aux_static(name, made, scale)


# ---- the backward over all pairs, split over the queries -----------------------------------------


def takes_splits(dtype: str, head_dim: int) -> bool:
    """Tell whether the library's backward can be split: tiles and operands are as expected."""
    plan = _whole_plan(dtype, head_dim)
    same_tile = (plan.tile_m, plan.tile_n) == whole_tile(head_dim)
    return plan.family == HOPPER and same_tile and knows_rows()


@lru_cache(maxsize=64)
def split_launch(dtype: str, head_dim: int, scale: float, batch: int, splits: int) -> Launch:
    """Make the library's backward over all pairs, for so many splits of so many batch rows."""
    settings = library()._sm90_bwd_kwargs(_whole_plan(dtype, head_dim).sm90, False, False)
    width = kernel_width(head_dim)
    kernel = split_class(batch, splits)(_dtype(dtype), width, width, 1, **settings)
    return Launch(kernel, scale)


def _whole_plan(dtype: str, head_dim: int) -> Any:
    """Return the library's plan of a backward over all pairs."""
    width = kernel_width(head_dim)
    return library()._bwd_plan(_dtype(dtype), width, width, 1, False, False, HOPPER)
