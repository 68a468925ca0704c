"""Passes over block-sparse lists that are split: over queries where keys are few, and over keys."""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import (
    band_lists,
    split_keys_lists,
    split_lists,
)
from maxattn.kernels.fa4.block_sparse_lists import (
    TileLists,
    TilingSpec,
    tiling,
    visits_by_keys,
    visits_by_queries,
)
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.split_lists import ListedWork, split, splits_of

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))
CONFIG = ma.AttentionConfig(attention="flash")
RNG = np.random.default_rng(4)

# ---- the lists of splits -------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], most: int = 13) -> TileLists:
    """Draw lists of rows in which every tile is mixed, full or neither."""
    kinds = RNG.integers(0, 3, (*shape, most))
    kinds[..., 0, :] = 0
    parts = []
    for kind in (1, 2):
        count = (kinds == kind).sum(-1).astype(np.int32)
        tiles = np.argsort(kinds != kind, axis=-1, stable=True).astype(np.int32)
        parts += [count, tiles]
    return TileLists(*parts)


def named(lists: TileLists, at: tuple[int, ...]) -> list[list[int]]:
    """Return the mixed and the full tiles of a row."""
    counts = lists.mixed_count[at], lists.full_count[at]
    each = zip(counts, (lists.mixed[at], lists.full[at]), strict=True)
    return [np.asarray(tiles)[: int(count)].tolist() for count, tiles in each]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_splits_share_out_every_list_evenly(
    shape: tuple[int, ...], splits: int, traced: bool
) -> None:
    lists = drawn(shape)
    given = TileLists(*map(jnp.asarray, lists)) if traced else lists
    found = jax.jit(split, static_argnums=1)(given, splits) if traced else split(given, splits)
    batch = 1 if len(shape) == 1 else shape[0]
    assert found.mixed_count.shape == (splits * batch, 7)
    work = np.asarray(lists.work)
    for at in np.ndindex(shape):
        b, row = (0, *at)[-2:]
        each = [named(found, (p * batch + b, row)) for p in range(splits)]
        for i, tiles in enumerate(named(lists, at)):
            assert sorted(column for part in each for column in part[i]) == tiles
        sizes = [len(mixed) + len(full) for mixed, full in each]
        assert max(sizes) - min(sizes) <= 2 and sum(sizes) == work[at]


def test_tiles_that_do_not_divide_go_to_splits_from_either_end() -> None:
    """One tile to test and one to take whole: each of two splits has one."""
    one, tiles = np.array([1], np.int32), np.array([[0], [1]], np.int32)
    assert split(TileLists(one, tiles[:1], one, tiles[1:]), 2).work.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "mask", [M.Causal(0), M.LocalWindow(300, 40, offset=0), M.BlockCausal(70, 0), M.Full()]
)
def test_visits_are_those_of_the_lists(mask: M.Mask) -> None:
    bound, lengths = mask.bind(1500, 333), (1500, 333)
    lists = tiling(TilingSpec(bound, (128, 64), (64, 128), lengths), (0, 0))
    assert (visits_by_queries(bound, (128, 64), lengths) == lists.forward.work).all()
    assert (visits_by_keys(bound, (64, 128), lengths) == lists.backward.work).all()


# ---- how many ------------------------------------------------------------------------------------


def played(work: ListedWork, splits: int, sms: int) -> float:
    """Return when a pass ends, thread block by thread block."""
    free = [0.0] * sms
    for _ in range(splits * work.lanes):
        for tiles in work.tiles.tolist():
            heapq.heapreplace(free, free[0] + -(-tiles // splits) + START)
    return max(free)


@pytest.mark.parametrize("sms", [132, 78])
def test_splits_end_sooner(sms: int) -> None:
    rng, chosen = np.random.default_rng(0), 0
    for _ in range(200):
        rows, lanes = int(rng.integers(1, 6)), int(rng.integers(1, 60))
        work = ListedWork(rng.integers(0, int(rng.integers(1, 900)), rows), lanes)
        splits = splits_of([work], 1e6, sms)
        best = min(played(work, n, sms) + split_lists.SUMS for n in (2, 3, 5, 8, 11, 16))
        assert splits > 1 or best > 0.8 * played(work, 1, sms) - split_lists.LEAST_TILES
        if splits > 1:
            assert played(work, splits, sms) + split_lists.SUMS < played(work, 1, sms)
        chosen += splits > 1
    assert 50 < chosen < 200


def call_of(sizes: tuple[int, ...], mask: M.Mask) -> ma.Call:
    return ma.Call(*sizes, "bfloat16", mask=mask.bind(*sizes[1:3]))


FEW = (2, 54016, 257, 2, 2, 128)


@pytest.mark.parametrize(
    ("sizes", "mask", "splits"),
    [
        (FEW, M.Causal(0), 11),  # 12 thread blocks, for 132 SMs
        ((2, 54016, 257, 8, 2, 128), M.Causal(0), 11),  # heads that share keys
        (FEW, M.LocalWindow(50000, 64, offset=0), 11),
        (FEW, M.BlockCausal(40, 0), 11),
        (FEW, M.Causal(0) & M.KeyLimit(257), 11),
        ((1, 4096, 4096, 8, 8, 64), M.Causal(), 1),
        ((1, 32760, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 7), 1),
        ((1, 65536, 257, 2, 2, 128), M.LocalWindow(64, 64, offset=0), 1),  # few queries see a key
        ((1, 300, 64, 2, 2, 128), M.Causal(0), 1),  # too short
    ],
)
def test_what_is_split_over_queries(sizes: tuple[int, ...], mask: M.Mask, splits: int) -> None:
    call = call_of(sizes, mask)
    lines = Fa4.build(call, CONFIG, H200).lines(call)
    assert (f"in {splits} splits of the queries" in lines.backward) is (splits > 1)
    assert Fa4.splits_backward(call, H200) is (splits > 1)
    smaller = ma.Target("gpu", "NVIDIA A100", (("fa4-jax", "0.1.0"),))
    assert "splits" not in Fa4.build(call, CONFIG, smaller).lines(call).backward


@pytest.mark.parametrize(
    ("sizes", "mask", "splits"),
    [
        ((1, 512, 32768, 12, 12, 128), M.LocalWindow(16000, 0), 5),
        ((1, 1560, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 14), 4),
        ((1, 256, 65536, 16, 4, 64), M.LocalWindow(30000, 30000), 4),
        ((1, 1024, 16384, 12, 12, 128), M.Causal(), 1),  # what all see has splits of its own
        ((1, 4680, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 7), 1),
        ((2, 1024, 1024, 4, 4, 128), M.LocalWindow(100, 100), 1),
    ],
)
def test_what_is_split_over_keys(sizes: tuple[int, ...], mask: M.Mask, splits: int) -> None:
    call = call_of(sizes, mask)
    lines = Fa4.build(call, CONFIG, H200).lines(call)
    assert (f"in {splits} splits of the keys" in lines.blocks) is (splits > 1)


def test_a_forward_in_splits_takes_a_share_of_its_time() -> None:
    call = call_of((1, 512, 32768, 12, 12, 128), M.LocalWindow(16000, 0))
    found = split_keys_lists.splits_for_call(call, (1, 512, 12, 128), (1, 32768, 12, 128), 132)
    assert found.splits == 5 and 0.4 < found.share < 0.7


def test_what_all_queries_see_is_left_to_splits_of_its_own() -> None:
    """Of one batch row, whose keys are no copies; else lists take all."""
    for batch in (1, 2):
        call = call_of((batch, 1024, 16384, 12, 12, 128), M.Causal())
        sizes = (batch, 1024, 12, 128), (batch, 16384, 12, 128)
        assert band_lists.lists_forward(call, *sizes, 132) is (batch > 1)


def test_splits_that_add_to_the_same_sums_take_no_memory() -> None:
    """Query heads that share keys do; others have dK and dV of each split, in whole tiles."""
    queries, keys = (1, 9000, 4, 20), (1, 130, 2, 20)
    assert split_lists.bytes_of_split(queries, keys) == 0
    assert split_lists.bytes_of_split((*queries[:2], 2, 20), keys) == 4 * 256 * 2 * 24


def test_only_a_band_from_the_first_query_and_key_goes_over_lists() -> None:
    q, k = (jax.ShapeDtypeStruct((2, n, 2, 128), "bfloat16") for n in FEW[1:3])
    inputs: Any = Inputs(q, k, k, mask=M.Causal(0).bind(*FEW[1:3]))  # pyright: ignore[reportArgumentType]
    assert band_lists.backward_pays(inputs, 132)
    for other in (
        inputs.replace(q_offset=64),
        inputs.replace(kv_offset=64),
        inputs.replace(mask=M.Full()),
        inputs.replace(mask=M.KeyLimit(100)),
    ):
        assert not band_lists.backward_pays(other, 132)
