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
    before_backward,
    plan_of,
    split_launch,
)
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.one_key_tile_kernel import one_key_tile_class
from maxattn.kernels.fa4.tile_sizes import Tile


class OneKeyTile(NamedTuple):
    """Say for what a backward over one tile of keys is compiled, beside its operands.

    Args:
        batch: rows; 0 where nothing is split.
        splits: of the queries; 1 for none.
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
    kernel = _kernel(one_key_tile_class(head_dim, *kind), spec)
    return OneKeyTileLaunches(tile, before_backward(spec), Launch(kernel, scale))


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


class SplitKind(NamedTuple):
    """Say for which splits of the queries a backward over several tiles of keys is compiled.

    Attributes:
        batch: rows; 0 where nothing is split.
        splits: of the queries; 1 for none.
        cut: whether the last tiles of keys alone go in splits.
    """

    batch: int = 0
    splits: int = 1
    cut: bool = False


class FirstWritesLaunches(NamedTuple):
    """Hold what runs in a backward whose first tile of keys writes dQ: the launches."""

    tile: Tile
    before: Any
    main: FirstWritesLaunch
    after: Any


@lru_cache(maxsize=256)
def first_writes_launches(
    dtype: str, head_dim: int, scale: float, tile: Tile, kind: SplitKind
) -> FirstWritesLaunches:
    """Make a backward whose first tile of keys writes dQ.

    Args:
        dtype, head_dim: of q, k and v.
        scale: multiplies the scores.
        tile: queries and keys at a time.
        kind: what is split.
    """
    spec, (batch, splits, cut) = _spec(dtype, head_dim, scale, tile), kind
    last = split_launch(dtype, head_dim, scale, batch, splits).kernel if cut else None
    of_first = first_writes_class(0, 1) if cut else first_writes_class(batch, splits)
    main = FirstWritesLaunch(_kernel(of_first, spec), last, scale)
    after = after_backward(spec, plan_of(spec), "post", "dq", scale)
    return FirstWritesLaunches(tile, before_backward(spec), main, after)


def _spec(dtype: str, head_dim: int, scale: float, tile: Tile) -> LaunchSpec:
    return LaunchSpec(dtype, head_dim, 1, scale, tile, Order(), None, arrays=0)


def _kernel(kernel_class: Any, spec: LaunchSpec) -> Any:
    settings = library()._sm90_bwd_kwargs(plan_of(spec).sm90, False, False)
    return kernel_class(*spec.backward_operands, **settings)
