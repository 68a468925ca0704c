"""Items cover each step of each tile row and head once; long ones start first."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.fa4.work import ALL, Cut, best_cut, end_of, group_of, items

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("how", [Cut(), Cut(3, 4), Cut(ALL, 5), Cut(1, 2)])
def test_arithmetic_items_cover_each_step_once(how: Cut) -> None:
    rows, lanes, steps = 7, 6, 11
    seen = np.zeros((rows, lanes, steps), int)
    for at in range(how.count(rows, lanes)):
        row, lane = map(int, how.place(at, rows, lanes, np))
        first, last = map(int, how.steps(row, lane, rows, lanes, steps, np))
        seen[row, lane % lanes, first:last] += 1
    assert (seen == 1).all()


def test_the_first_tile_row_of_a_head_is_the_first_of_its_items() -> None:
    """Other tile rows may wait for it, so it must have started before them."""
    how = Cut(ALL, 3)
    places = [how.place(at, 4, 2, np) for at in range(how.count(4, 2))]
    for lane in range(6):
        assert next(row for row, where in places if where == lane) == 0


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_items_of_lists_cover_each_step_once(traced: bool, own_rows: bool, splits: int) -> None:
    batch, heads, rows = 2, 4, 9
    work = RNG.integers(0, 12, (batch, rows) if own_rows else (rows,)).astype(np.int32)
    given = jnp.asarray(work) if traced else work
    found = np.asarray(items(given, (batch, heads), 2, splits))
    lanes = batch * heads
    assert found.shape == (rows * lanes * splits, 4) and found.dtype == np.int32
    seen = np.zeros((rows, lanes, 12), int)
    for row, lane, first, last in found:
        seen[row, lane % lanes, first:last] += 1
    every = np.repeat(work, heads, axis=0).T if own_rows else np.repeat(work[:, None], lanes, 1)
    assert (seen == (np.arange(12) < every[..., None])).all()


def test_long_items_start_first_in_groups_of_lanes() -> None:
    found = items(np.array([1, 5, 3], np.int32), (1, 4), 2)
    assert found[:6, 0].tolist() == [1, 1, 2, 2, 0, 0]
    assert set(found[:6, 1].tolist()) == {0, 1} and set(found[6:, 1].tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("lanes", "each", "group"), [(10, 1.0, 10), (12, 1.0, 6), (12, 3.0, 3), (7, 3.0, 1)]
)
def test_a_group_is_the_most_lanes_that_fit_and_divide(lanes: int, each: float, group: int) -> None:
    assert group_of(lanes, each, 10.0) == group


def test_the_makespan_of_equal_items_is_that_of_their_waves() -> None:
    assert end_of(np.full(5, 2.0), 3, 4) == 8.0
    assert end_of(np.array([4.0, 1.0, 1.0, 1.0, 1.0]), 1, 2) == 4.0


def time_of(steps: np.ndarray, running: int) -> np.ndarray:
    return 2.0 + steps


@pytest.mark.parametrize(
    ("rows", "lanes", "merge", "want"),
    [
        (256, 12, 5.0, (3, True)),  # 23.3 waves: the rows after the last full one
        (4, 12, 5.0, (ALL, True)),  # less than a wave: all
        (11, 12, 5.0, (0, False)),  # one full wave: nothing
        (4, 12, 1e6, (0, False)),  # a merge that costs more than it saves
    ],
)
def test_what_is_cut_ends_sooner(rows: int, lanes: int, merge: float, want: tuple) -> None:
    steps = np.full(rows, 400)
    end, found = best_cut(steps, lanes, 132, time_of, lambda rows, splits: merge, 32, tails=True)
    assert (found.tail, found.splits > 1) == want
    assert end <= end_of(time_of(steps, 0), lanes, 132)
