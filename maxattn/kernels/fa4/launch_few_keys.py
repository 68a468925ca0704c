"""FlashAttention-4's backwards of few keys as objects, made once for each request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.first_writes_kernel import first_writes_class
from maxattn.kernels.fa4.launch import (
    Launch,
    LaunchSpec,
    after_backward,
    plan_of,
    split_launch,
)
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.one_key_tile_kernel import one_key_tile_class
from maxattn.kernels.fa4.tile_sizes import Dims, Tile


class OneKeyTile(NamedTuple):
    """Say for what a backward over one tile of keys is compiled, beside its operands.

    Args:
        batch: rows.
        splits: of the queries.
        has_lengths: whether batch rows have lengths of keys.
    """

    batch: int
    splits: int
    has_lengths: bool


class OneKeyTileLaunches(NamedTuple):
    """Hold what runs in a backward over one tile of keys: before it, and itself."""

    tile: Tile
    before: Any
    main: Launch


@lru_cache(maxsize=256)
def one_key_tile_launches(
    dtype: str, head_dim: int, scale: float, tile: Tile, kind: OneKeyTile
) -> OneKeyTileLaunches:
    """Make a backward over one tile of keys."""
    spec = _spec(dtype, head_dim, scale, tile)
    kernel = _kernel(one_key_tile_class(*kind), spec)
    return OneKeyTileLaunches(tile, _before(spec), Launch(kernel, scale))


@dataclass(frozen=True, eq=False)
class FirstWritesLaunch:
    """Hold the kernels of a backward whose first tile of keys writes dQ; compared by identity.

    Attributes:
        first: of the first tiles of keys, or of all.
        last: of those whose queries are split, where they are not all; else None.
        scale: multiplies the scores.
    """

    first: Any
    last: Any
    scale: float


class FirstWritesLaunches(NamedTuple):
    """Hold what runs in such a backward.

    Attributes:
        tile: queries and keys at a time.
        before, main, after: the launches.
        first_keys: keys before those whose queries are split; 0 where all go one way.
        splits: of the queries; 1 for none.
    """

    tile: Tile
    before: Any
    main: FirstWritesLaunch
    after: Any
    first_keys: int
    splits: int


@lru_cache(maxsize=256)
def first_writes_launches(
    dtype: str, head_dim: int, scale: float, tile: Tile, tail: tuple[int, int], keys: Dims
) -> FirstWritesLaunches:
    """Make a backward whose first tile of keys writes dQ.

    Args:
        dtype, head_dim: of q, k and v.
        scale: multiplies the scores.
        tile: queries and keys at a time.
        tail: how many tiles of keys, the last ones, are split, and into how many splits.
        keys: shape of k.
    """
    (batch, length, *_), (tiles, splits) = keys, tail
    first_keys = (-(-length // tile.keys) - tiles) * tile.keys if splits > 1 else 0
    cut = first_keys > 0
    spec, last = _spec(dtype, head_dim, scale, tile), None
    if cut:
        last = split_launch(dtype, head_dim, scale, batch, splits).kernel
    first = _kernel(first_writes_class(batch, 1 if cut else splits), spec)
    main = FirstWritesLaunch(first, last, scale)
    after = after_backward(spec, plan_of(spec), "post", "dq", scale)
    return FirstWritesLaunches(tile, _before(spec), main, after, first_keys, splits)


def _spec(dtype: str, head_dim: int, scale: float, tile: Tile) -> LaunchSpec:
    return LaunchSpec(dtype, head_dim, 1, scale, tile, Order(), None, arrays=0)


def _kernel(kernel_class: Any, spec: LaunchSpec) -> Any:
    settings = library()._sm90_bwd_kwargs(plan_of(spec).sm90, False, False)
    return kernel_class(*spec.operands, **settings)


def _before(spec: LaunchSpec) -> Any:
    lib, (dtype, head_dim, *_) = library(), spec.operands
    made = lib._get_bwd_pre(dtype, head_dim, head_dim, spec.tile.queries)
    return lib._aux_static("pre", made, spec.scale)
