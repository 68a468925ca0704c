"""Which bands go by block-sparse lists, and which tiles short calls take, as plans say it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import band_lists
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.tile_sizes import Tile, backward_tile, whole_tile

IDS = np.zeros((1, 64), np.int32)
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def call(mask: M.Mask, t: int, s: int, head_dim: int = 64, heads: int = 600) -> ma.Call:
    q, k = (jax.ShapeDtypeStruct((1, n, heads, head_dim), jnp.bfloat16) for n in (t, s))
    return ma.Call.of(q, k, mask.bind(t, s, 1, heads))


def gains(mask: M.Mask, t: int, s: int, head_dim: int = 64, heads: int = 600) -> bool:
    asked = call(mask, t, s, head_dim, heads)
    return band_lists.gains_by_lists(asked, (1, t, heads, head_dim))


def order(mask: M.Mask, t: int, s: int, head_dim: int = 64, heads: int = 600) -> Order:
    asked = call(mask, t, s, head_dim, heads)
    return band_lists.forward_order(asked, (1, t, heads, head_dim))


def test_bands_of_short_rows_are_persistent() -> None:
    window = M.LocalWindow(200, 0)
    for asked in ((M.Causal(), 64, 64), (M.Causal(), 1152, 1152), (window, 40_000, 40_000)):
        assert gains(*asked) and order(*asked).persistent
    # Up to a thread block for each SM there is no start to save.
    assert not gains(M.Causal(), 128, 128, 128, 132) and gains(M.Causal(), 128, 128, 128, 133)


def test_bands_of_long_rows_go_by_lists_with_a_thread_block_each() -> None:
    long = M.Causal(), 8192, 8192  # 32 tiles a row on average
    assert gains(*long) and gains(*long, 128)
    assert not order(*long, 128).persistent
    assert not gains(*long, 160) and not gains(M.Causal(), 70_000, 70_000)
    assert not gains(M.Causal(), 2048, 16_384)  # copies of what all queries see are few


@pytest.mark.parametrize("mask", [M.LocalWindow(10_000, 10_000), M.Causal(offset=5000)])
@pytest.mark.parametrize(("length", "heads"), [(4096, 16), (3000, 4), (300, 600)])
def test_a_mask_that_hides_nothing_has_no_lists(mask: M.Mask, length: int, heads: int) -> None:
    assert not gains(mask, length, length, 96, heads)


def test_short_rows_of_heads_too_long_to_persist_go_by_lists() -> None:
    short = M.Causal(), 832, 832, 192
    assert gains(*short) and not order(*short).persistent
    assert gains(M.Causal(), 832, 832, 256) and not gains(M.Causal(), 3000, 3000, 192)
    assert not gains(M.LocalWindow(100, 100), 832, 832, 192)  # whose rows are even


def test_a_single_wave_goes_by_lists_for_smaller_tiles() -> None:
    """The longest of 33 rows of 128x128 tiles ends before that of 22 of the library's 192x144."""
    assert gains(M.Causal(), 4187, 4187, 96, 4)
    assert not gains(M.Causal(), 4187, 4187, 128, 4)  # the library's tiles are as large


def inputs(mask: M.Mask, t: int, s: int, head_dim: int = 64, heads: int = 600) -> Inputs:
    q, k = (jax.ShapeDtypeStruct((1, n, heads, head_dim), jnp.bfloat16) for n in (t, s))
    return Inputs(q, k, k, mask=mask.bind(t, s))  # pyright: ignore[reportArgumentType]


def test_a_forward_goes_by_lists_where_these_are_split_or_its_rows_are_short() -> None:
    short, split = inputs(M.Causal(), 1152, 1152), (M.LocalWindow(16000, 0), 512, 32768, 128, 12)
    assert band_lists.forward_pays(short, 132)
    assert band_lists.forward_pays(inputs(*split), 132) and not gains(*split)
    assert not band_lists.forward_pays(inputs(M.Causal(), 8192, 8192, 160), 132)


def test_a_backward_goes_by_lists_where_these_are_split() -> None:
    assert band_lists.backward_pays(inputs(M.Causal(0), 54016, 257, 128, 2), 132)
    assert not band_lists.backward_pays(inputs(M.Causal(), 8192, 8192), 132)


@pytest.mark.parametrize("more", [M.KeyPadding(np.array([40])), M.Segments(IDS, IDS)])
def test_lists_made_on_the_device_are_not_known(more: M.Mask) -> None:
    assert not gains(more, 64, 64) and not gains(M.Causal() & more, 64, 64)


def test_a_backward_over_all_pairs_has_tiles_of_its_own_for_long_heads() -> None:
    assert whole_tile(96) == backward_tile(96) and whole_tile(136) == backward_tile(136)
    assert whole_tile(104) == whole_tile(128) == Tile(80, 128) != backward_tile(128)
    few = [t for t in range(1, 700) if whole_tile(128, t) == backward_tile(128)]
    assert few == [*range(1, 65), *range(81, 129), *range(161, 193), *range(241, 257)]


def test_the_plan_says_how_a_short_band_goes() -> None:
    short = call(M.Causal(), 64, 64)
    made = ma.plan(short, ma.AttentionConfig(attention="flash"), target=H200)
    assert "block-sparse lists of 64x64 tiles" in str(made) and "persistent" in str(made)
