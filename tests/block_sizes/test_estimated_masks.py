"""Estimated costs of a call under a mask of positions: steps of each kernel's grid, and plans."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.block_sizes.estimated.choose import not_estimated, price
from maxattn.block_sizes.estimated.grids import step_grid, tile_shares
from maxattn.block_sizes.estimated.step_cost import Evaluates, StepCost, StepGrid
from maxattn.kernels.splash.calls import Setup
from maxattn.kernels.splash.mask_info import schedule
from maxattn.kernels.splash.tokamax import PARTIAL, WHOLE, marks_of, steps
from maxattn.kernels.transposed.steps import steps_of
from maxattn.masks import Mask
from maxattn.masks.terms import SplitMask, packed_interval, split_mask
from maxattn.masks.tile_kinds import tile_kinds
from maxattn.target import Target
from tests.block_sizes.small_costs import KIND, costs, own_costs, shipping
from tests.golden_text import check_golden

V6E = Target.named(KIND)
AUTO = ma.AttentionConfig()


def call(mask: Mask, q_len: int = 8192, kv_len: int = 8192) -> ma.Call:
    return ma.Call(1, q_len, kv_len, 2, 2, 128, "bfloat16", mask.bind(q_len, kv_len, 1, 2).form())


CAUSAL = M.Causal()
MASKS = {
    "causal": call(CAUSAL),
    "blocks": call(M.BlockCausal(1560), 6240, 6240),
    "window": call(M.LocalWindow(2500, 300), 8000, 8000),
    "blocks, window": call(M.BlockSlidingWindow(1560, 3), 7800, 7800),
    "segments": call(M.Segments.of_lengths((3000, 1000, 4000)), 8000, 8000),
}
TILE = 512, 1024, 512


def test_steps_of_a_causal_call():
    # 16 x 8 tiles of 512 x 1,024: a row of queries visits 1, 1, 2, 2, ... 8, 8 tiles, 72 in all.
    # In each row one is on the diagonal, half of it or all but half.
    grids = {
        name: step_grid(kind, TILE, MASKS["causal"], kernel)  # type: ignore[arg-type]
        for name, kind, kernel in (
            ("rows", "fwd", "flash"),
            ("keys", "dkv", "flash"),
            ("all", "fused", "flash"),
            ("listed", "fwd", "tokamax_flash"),
        )
    }
    assert grids["rows"] == StepGrid(2, 16, 8.0, 16 / 128, 56 / 128)
    assert grids["keys"] == StepGrid(2, 8, 16.0, 16 / 128, 56 / 128) == grids["all"]
    assert grids["listed"] == StepGrid(2, 16, 4.5, 16 / 72, 0.0)
    assert tile_shares(MASKS["causal"], TILE) == (56 / 128, 16 / 128)


@pytest.mark.parametrize("name", MASKS)
def test_the_steps_are_those_that_the_kernels_list(name):
    one = MASKS[name]
    parts = split_mask(one.mask)
    assert isinstance(parts, SplitMask)
    kinds = tile_kinds(parts.positions, *TILE[:2], one.q_len, one.kv_len, 0, 0)
    rows, columns = kinds.shape
    padded = rows * TILE[0], columns * TILE[1]
    setup = Setup(kinds, None, None, padded, padded[1] > one.kv_len)
    marks = marks_of(setup)
    grid = partial(step_grid, tile=TILE, call=one)
    for kind, each in (("fwd", marks), ("dkv", marks.T)):
        found = grid(kind, kernel="flash")
        listed, runs = schedule(each != 0, shrink=True)
        assert found and (found.rows, found.columns) == listed.shape
        assert found.idle == pytest.approx(1 - runs.mean())
        assert found.masked * found.rows * found.columns == pytest.approx((each == PARTIAL).sum())
    own, tokamax = grid("fused", kernel="tpu_flash"), grid("fwd", kernel="tokamax_flash")
    made, (*_, count) = steps_of(setup, by_key=True), steps(marks)
    assert own and made and tokamax
    assert own.columns == made.count
    assert own.masked == pytest.approx(float(np.mean(np.asarray(made.mark) == PARTIAL)))
    assert own.idle == pytest.approx(float(np.mean(np.asarray(made.mark) == 0)))
    assert tokamax.rows * tokamax.columns == pytest.approx(int(count[0]))
    assert (marks == WHOLE).any()


OTHERS = {
    "nothing": call(M.LocalWindow(10, 10, 100_000)),
    "a_sink": call(M.VideoMask(8, 1024, 1, 3, 1)),
    "two_ends_of_many_bits": call(M.LocalWindow(70_000, 70_000), 200_000, 200_000),
    "rectangle": call(M.Rectangle(0, 4096, 0, 4096)),
    "both": call(M.Causal() & M.BlockSlidingWindow(1024, 3)),
    "either": call(M.Causal() | M.BlockSlidingWindow(1024, 3)),
}


def test_a_query_s_keys_may_be_one_interval_that_fits_a_word():
    packed = {n: packed_interval(one.mask, one.kv_len) is not None for n, one in OTHERS.items()}
    assert {name for name, fits in packed.items() if fits} == {"nothing", "rectangle", "both"}
    assert all(packed_interval(one.mask, one.kv_len) for one in MASKS.values())


def test_a_call_that_sees_nothing_has_a_step_a_row():
    nothing = OTHERS["nothing"]
    assert step_grid("fwd", TILE, nothing, "flash") == StepGrid(2, 16, 1.0, 0.0, 1.0)
    assert step_grid("fwd", TILE, nothing, "tokamax_flash") == StepGrid(2, 16, 1 / 16, 0.0, 1.0)


def test_a_step_that_computes_nothing_runs_no_body_and_fetches_nothing():
    step = StepCost(100, 40, (200.0, 10.0, 0.0), (300.0, 20.0, 0.0), 1, 10**9, 0, 0)
    grid = StepGrid(1, 1, 4, 0.25, 0.5)
    assert step.cycles(grid) == (100 + 10 + 50 + 75, 100 + 10 + 50 + 75 + 2.5 + 5)
    machine = V6E.device.machine
    assert machine is not None
    assert step.seconds(grid, V6E.device).fast == pytest.approx(2e9 / machine.hbm)


def test_a_mask_is_priced_by_its_own_schedules_alone():
    known, window = costs(100, 350, interval=True), MASKS["causal"]
    found = price(known, "fwd", (1024,) * 3, window, V6E, "flash")
    assert found is not None and found.fast == pytest.approx(2 * 64 * 350 / 1.75e9)
    assert price(costs(100, 350), "fwd", (1024,) * 3, window, V6E, "flash") is None
    assert {what for _, what in known} == set(Evaluates)


REFUSED = {
    "a rank": replace(MASKS["causal"], sharded=True, sequence=(32768, 32768)),
    "two_intervals": call(M.VideoMask(8, 1024, 1, 3, 1)),
    "arrays": call(M.KeyPadding(np.array([8000]))),
    "no_schedules": MASKS["causal"],
    "a_bias": replace(call(M.Full()), bias=(1, 1, 8192, 8192), bias_dtype="bfloat16"),
}


def test_what_estimates_do_not_hold_for_is_said(monkeypatch):
    with shipping(monkeypatch, flash=costs(100, 350)):
        said = [f"{name}: {not_estimated('flash', one, V6E)}" for name, one in REFUSED.items()]
    check_golden("explain/masks_not_estimated", "\n".join(said))


def test_auto_takes_the_faster_kernel_under_a_window(monkeypatch):
    own = own_costs(700, 1000, interval=True)
    with shipping(monkeypatch, flash=costs(100, 350, interval=True), tpu_flash=own):
        plan = ma.plan(MASKS["causal"], AUTO, None, V6E)
        slower = ma.plan(call(M.LocalWindow(200, 200)), AUTO, None, V6E)
    # Around a narrow window tiles of 2,048 hold many more pairs than tiles of 512.
    assert (plan.kernel.name, slower.kernel.name) == ("tpu_flash", "flash")
    check_golden("explain/estimated_masks", f"{plan.explain()}\n\n{slower.explain()}")


def test_a_ring_under_a_mask_is_not_priced(monkeypatch):
    ring = ma.AttentionConfig(attention="ring", ici_context_parallelism=4)
    with shipping(monkeypatch, flash=costs(100, 350, interval=True)):
        plan = ma.plan(MASKS["causal"], ring, {"context": 4}, V6E)
    assert not any("estimated" in note for note in plan.notes)
