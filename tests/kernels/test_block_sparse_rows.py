"""Lists of tiles for each batch row, made on the device, against every pair of the mask."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.block_sparse_rows import row_tiling
from tests.kernels.test_data_skips import MASKS, S, T, allowed

FORWARD, BACKWARD = (16, 8), (8, 16)


def of_row(lists: TileLists, b: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which tiles of a batch row are visited, and which of them go untested.

    Lists without a batch axis are of all batch rows.
    """
    if lists.mixed_count.ndim == 1:
        lists = TileLists(*(np.asarray(x)[None] for x in lists))
    found = np.zeros((2, lists.mixed_count.shape[1], columns), bool)
    for i in range(found.shape[1]):
        mixed, full = (
            np.asarray(at[b, i, : int(count[b, i])])
            for count, at in ((lists.mixed_count, lists.mixed), (lists.full_count, lists.full))
        )
        assert (np.diff(mixed) > 0).all() and (np.diff(full) > 0).all()
        assert not set(mixed.tolist()) & set(full.tolist())
        found[0, i, [*mixed, *full]] = True
        found[1, i, full] = True
    return found[0], found[1]


def tile_table(table: np.ndarray, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Say of each tile whether some pair is allowed, and whether all are."""
    rows, columns = (range(0, n, size) for n, size in zip(table.shape, tile, strict=True))
    cut = [[table[i : i + tile[0], j : j + tile[1]] for j in columns] for i in rows]
    some = np.array([[x.any() for x in row] for row in cut])
    return some, np.array([[x.all() for x in row] for row in cut])


@cache
def tiling_of(name: str) -> Any:
    """Make the lists of a mask, in one program, once."""
    made = jax.jit(lambda m: row_tiling(m, (FORWARD, BACKWARD), (T, S)))(MASKS[name].bind(T, S))
    return jax.tree.map(np.asarray, made)


@pytest.mark.parametrize("name", MASKS)
def test_lists_hold_what_each_row_sees(name: str) -> None:
    table, made = allowed(MASKS[name]), tiling_of(name)
    assert made.forward.work.shape[:-1] == (() if len(table) == 1 else (len(table),))
    for b in range(len(table)):
        for lists, tile, turn in ((made.forward, FORWARD, False), (made.backward, BACKWARD, True)):
            some, every = (x.T if turn else x for x in tile_table(table[b], tile))
            visited, untested = of_row(lists, b, some.shape[1])
            assert not (some & ~visited).any() and not (untested & ~every).any()
            if turn:  # past the last key its kernel takes nothing untested
                assert not untested[S // tile[1] :].any()


@pytest.mark.parametrize("name", ["sorted", "lengths", "causal & lengths"])
def test_of_sorted_ids_and_of_lengths_no_row_visits_what_is_empty(name: str) -> None:
    table, lists = allowed(MASKS[name]), tiling_of(name).forward
    for b in range(len(table)):
        some, every = tile_table(table[b], FORWARD)
        visited, untested = of_row(lists, b, some.shape[1])
        assert (visited == some).all() and (untested == every).all()
