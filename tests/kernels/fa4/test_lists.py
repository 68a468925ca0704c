"""Tile lists, and the pair test in mixed tiles, allow the same pairs as the mask."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import lists
from maxattn.kernels.fa4.lists import Lists, Masked, masked_inputs
from maxattn.kernels.fa4.problem import of_inputs
from maxattn.kernels.fa4.tiles import Tile
from tests.waiting import but

RNG = np.random.default_rng(3)
IDS = np.sort(RNG.integers(0, 5, (2, 300)), axis=1).astype(np.int32)
MASKS = {
    "causal": M.Causal(),
    "window": M.LocalWindow(70, 30),
    "block window": M.BlockSlidingWindow(50, 2),
    "three intervals": M.LocalWindow(20, 20) | M.KeyLimit(40) | ~M.KeyLimit(260),
    "known segments": M.Segments.of_lengths((100, 37, 150, 13)),
    "segments": M.Segments(IDS, IDS),
    "shared segments": M.Segments(IDS[:1], IDS[:1]),
    "causal & segments": M.Causal() & M.Segments(IDS, IDS),
    "causal & lengths": M.Causal() & M.KeyPadding(np.array([200, 0])),
    "window & flags": M.LocalWindow(70, 30) & M.KeyPadding(RNG.random((2, 300)) < 0.6),
}


def named(found: Lists, row: int, batch: int = 0) -> tuple[list[int], list[int]]:
    """Read the mixed and full tiles of a tile row as a kernel does."""
    array = np.asarray(found.array)
    if found.is_ranges:
        mixed, full, first = array[row, :3]
        return array[row, 3 : 3 + mixed].tolist(), list(range(first, first + full))
    halves = array[:, batch] if found.array.ndim == 4 else array
    mixed, full = (half[row, 1 : 1 + half[row, 0]].tolist() for half in halves)
    return mixed, full


def in_one_program(inputs: Inputs, tile: Tile, by: str) -> tuple[Masked, tuple[Lists, Any]]:
    """Return what a pass is given, as traced, and its lists and arrays as computed."""
    problem, traced = of_inputs(inputs, 132), []
    at = inputs.q_offset, inputs.kv_offset

    def compute(at: Any) -> Any:
        given = replace(inputs, q_offset=at[0], kv_offset=at[1])
        traced.append(masked_inputs(problem, tile, given, by))
        return traced[0].lists.array, traced[0].arrays

    is_traced = isinstance(at[0], jax.Array)
    array, arrays = jax.jit(compute)(at) if is_traced else jax.jit(lambda: compute(at))()
    lists = traced[0].lists._replace(array=array)
    return traced[0], (lists, tuple(map(np.asarray, arrays)))


def pairs_of(inputs: Inputs, tile: Tile, by: str) -> np.ndarray:
    """Follow the lists as a kernel does; count how often each pair is visited and kept."""
    given, (lists, arrays) = in_one_program(inputs, tile, by)
    test, found = given.test, np.zeros((2, 300 + 256, 300 + 256), int)
    assert test is not None
    rows = lists.array.shape[0 if lists.is_ranges else -2]
    for batch, row in np.ndindex(2, rows):
        for kind, tiles in enumerate(named(lists, row, batch)):
            for other in tiles:
                place = (row, other) if by == "queries" else (other, row)
                q, k = (i * n + np.arange(n) for i, n in zip(place, tile, strict=True))
                kept = kind == 1 or test(batch, q[:, None], k[None], arrays, np)
                found[batch][np.ix_(q, k)] += kept
    return found[:, :300, :300]


# A ninth: a mask traced or not, with its lists by queries or by keys.
EACH = list(product(MASKS, [False, True], ["queries", "keys"]))


@pytest.mark.parametrize(("name", "traced", "by"), but(EACH, EACH[::9]))
def test_each_allowed_pair_is_kept_once(name: str, traced: bool, by: str) -> None:
    mask = MASKS[name].bind(300, 300)
    q: Any = jnp.zeros((2, 300, 2, 8), jnp.bfloat16)
    at = (jnp.int32(0), jnp.int32(0)) if traced else (0, 0)
    inputs = Inputs(q, q, q, mask=mask, q_offset=at[0], kv_offset=at[1])
    want = np.asarray(mask.allowed(np.arange(300), np.arange(300)))[:, 0]
    for tile in (Tile(64, 48), Tile(128, 112)):
        assert (pairs_of(inputs, tile, by) == want).all()


@pytest.mark.parametrize("name", ["causal", "window", "block window"])
def test_full_tiles_side_by_side_are_ranges(name: str) -> None:
    found = lists.of_positions(MASKS[name].bind(300, 300), (64, 48), (300, 300), (0, 0), "queries")
    assert found.is_ranges and found.array.shape[1] <= 3 + lists.MOST_MIXED


@pytest.mark.parametrize("by", ["queries", "keys"])
@pytest.mark.parametrize("name", ["causal", "window", "block window", "three intervals"])
def test_work_is_counted_without_lists(name: str, by: str) -> None:
    mask = MASKS[name].bind(300, 300)
    for offsets in ((0, 0), (40, 30)):
        told = mask, (64, 48), (300, 300), offsets, by
        assert (lists.work(*told) == lists.of_positions(*told).work).all()


def test_a_tile_that_holds_more_than_keys_is_mixed_for_a_backward() -> None:
    mask = M.LocalWindow(400, 400).bind(300, 300)
    mixed, full = named(lists.of_positions(mask, (64, 128), (300, 300), (0, 0), "keys"), 2)
    assert mixed == list(range(5)) and not full


@pytest.mark.parametrize("columns", [7, 32, 100, 3000])
def test_lists_made_on_the_device_name_the_chosen_columns(columns: int) -> None:
    kinds = RNG.integers(0, 3, (2, 3, columns)).astype(np.int8)
    found = jax.jit(lists.traced)(kinds)
    for batch, row in np.ndindex(2, 3):
        mixed, full = named(found, row, batch)
        assert mixed == np.flatnonzero(kinds[batch, row] == M.MIXED).tolist()
        assert full == np.flatnonzero(kinds[batch, row] == M.FULL).tolist()
        assert found.work[batch, row] == len(mixed) + len(full)
