"""Estimated costs of calls, the tiles that they rank first, and plans that use them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.block_sizes import BlockSizes, fused_partials_bytes
from maxattn.block_sizes.estimated.choose import choose, estimated_sizes, price, ranked, seconds_of
from maxattn.block_sizes.estimated.step_cost import StepCost, StepGrid
from maxattn.block_sizes.estimated.table import read_table, shipped, table_text
from maxattn.block_sizes.sizes import DKV, DQ, FORWARD
from maxattn.devices import DEVICES
from maxattn.target import Target
from maxattn.tuned import Tuned, key_of
from tests.block_sizes.small_costs import CLOCK, KIND, cost, costs, own_costs, shipping
from tests.golden_text import check_golden
from tests.kernel_of import blocks_of

V6E = Target.named(KIND)
CALL = ma.Call(1, 8192, 8192, 2, 2, 128, "bfloat16")
FLASH = ma.AttentionConfig(attention="flash")
AUTO = ma.AttentionConfig()
OWN_KERNEL = ma.AttentionConfig(attention="tpu_flash")


def test_a_step_is_its_bundles_and_its_body():
    step = StepCost(100, 40, (200.0, 10.0, 250.0), (300.0, 20.0, 280.0), 1, 0, 0, 0)
    # Four tiles a row, one of them with the mask: 100 + 40 / 4 + (3 * 200 + 300) / 4, waits beside.
    assert step.cycles(StepGrid(1, 1, 4, 0.25)) == (335.0, 347.5)
    busy = step._replace(full=(200.0, 10.0, 400.0), masked=(300.0, 20.0, 400.0))
    assert busy.cycles(StepGrid(1, 1, 4, 0.25)) == (400.0, 347.5)


def test_two_cores_share_the_steps_and_hbm_may_be_slower():
    grid, device = StepGrid(2, 4, 8, 0.0), DEVICES["TPU v5p"]
    one, two = (cost(1000)._replace(cores=n).seconds(grid, device) for n in (1, 2))
    assert one.slow == pytest.approx(64 * 1000 / CLOCK) and two.slow == pytest.approx(one.slow / 2)
    assert device.machine is not None
    fetched = cost(1000, step_bytes=10**9).seconds(grid, device)
    assert fetched == pytest.approx((64e9 / device.machine.hbm,) * 2)


def test_padding_costs_whole_tiles():
    known, longer = costs(100, 350), replace(CALL, kv_len=8200)
    fitting, padded = (price(known, "fwd", (1024,) * 3, c, V6E, "flash") for c in (CALL, longer))
    assert fitting is not None and padded is not None
    assert padded.slow == pytest.approx(fitting.slow * 9 / 8)


def sides(known) -> list[int]:
    return [one.sizes.block_q for one in ranked(known, CALL, "flash", V6E, False, False)]


def test_the_slow_end_ranks():
    """A tile of 1,024 has a quarter of the steps: 350 bundles against 4 * 100, then 600 waits."""
    known = costs(100, 350)
    assert sides(known) == [1024, 512]
    large, waits = (1024, 1024, 1024), (0.0, 600.0, 0.0)
    tiles = known["fwd", False]
    waiting = {**tiles, large: tiles[large]._replace(full=waits, masked=waits)}
    assert sides({("fwd", False): waiting}) == [512, 1024]


def test_backward_tiles_divide_the_forwards():
    known = {key: dict(tiles) for key, tiles in costs(100, 350).items()}
    for kind in ("fwd", "dkv"):
        known[kind, False][1024, 512, 512] = cost(120)  # type: ignore[index]
    best, *_ = ranked(known, CALL, "flash", V6E, True, False)
    assert best.sizes.part(FORWARD) == (1024, 512, 512) == best.sizes.part(DKV)
    assert best.sizes.part(DQ) == (512, 512)  # 1,024 keys divide no block of 512


def test_tiles_that_the_rules_would_change_are_left_out():
    known = {("fwd", False): {(512, 512, 512): cost(100), (8192, 2048, 2048): cost(1)}}
    one, *others = ranked(known, CALL, "flash", V6E, False, False)  # type: ignore[arg-type]
    assert one.sizes.block_q == 512 and not others  # the other needs more VMEM than there is


def test_a_tie_keeps_the_rules_sizes():
    tied, faster = costs(100, 4 * 98), costs(100, 4 * 96)
    for known, side in ((tied, 512), (faster, 1024)):
        found = choose(known, "flash", CALL, V6E, True)
        assert found is not None and found.sizes.block_q == side


def test_the_fused_backward_pays_for_its_parts():
    known = costs(100, 350, fused=True)
    sizes = BlockSizes(512, 512, 512, 512, 512, 512, use_fused_bwd_kernel=True)
    whole = seconds_of(known, sizes, CALL, "flash", V6E)
    kernels = [price(known, kind, (512,) * 3, CALL, V6E, "flash") for kind in ("fwd", "fused")]
    parts = 16 * 2 * 8192 * 128 * 2  # of 512 keys, of two heads, in bfloat16
    machine = V6E.device.machine
    assert whole is not None and machine is not None
    own = sum(one.slow for one in kernels if one)
    assert whole.slow == pytest.approx(own + parts / machine.hbm)


EITHER = {**costs(60, 200, fused=True), **costs(100, 350)}  # the fused backward is faster
LARGE = replace(CALL, heads=40, kv_heads=40, q_len=65536, kv_len=65536)


def test_flash_takes_the_faster_backward_whose_parts_fit():
    small, large = (choose(EITHER, "flash", call, V6E, True) for call in (CALL, LARGE))
    assert small is not None and small.sizes.use_fused_bwd_kernel
    assert large is not None and not large.sizes.use_fused_bwd_kernel
    assert fused_partials_bytes(LARGE, small.sizes) > 0.1 * 31.25 * 2**30
    forward = choose(EITHER, "flash", CALL, V6E, False)
    assert forward is not None and forward.sizes == BlockSizes(1024, 1024, 1024)


def test_the_table_that_ships():
    """The file equals what the code writes, and has all tiles that are used by default."""
    found = shipped()
    assert read_table(table_text(*found)) == found
    for name, known in found.groups.items():
        assert any(kind == "fwd" and tiles for (kind, _), tiles in known.items()), name
        for tiles in known.values():
            assert all(c.always > 0 and c.cores in (1, 2) for c in tiles.values())


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_takes_the_fastest_tiles_and_says_so(monkeypatch):
    with shipping(monkeypatch, flash=costs(100, 350, waits=10)):
        plan = ma.plan(CALL, FLASH, None, V6E)
        assert blocks_of(plan.kernel).block_q == blocks_of(plan.kernel.for_inference()).block_q
        assert blocks_of(plan.kernel).part(DQ) == (1024, 1024)
        check_golden("explain/estimated_sizes", plan.explain())


def test_what_the_config_sets_is_not_estimated(monkeypatch):
    with shipping(monkeypatch, flash=costs(100, 350)):
        plan = ma.plan(CALL, FLASH.replace(flash_block_sizes={"block_kv": 512}), None, V6E)
        assert blocks_of(plan.kernel).block_q == 512
        assert not any("estimated" in note for note in plan.notes)
        in_float32 = ma.plan(CALL, FLASH.replace(float32_qk_product=True), None, V6E)
        assert not any("estimated" in note for note in in_float32.notes)


@pytest.mark.parametrize("fused", [True, False])
def test_a_backward_that_is_named_takes_its_fastest_tiles(monkeypatch, fused):
    named = FLASH.replace(flash_block_sizes={"use_fused_bwd_kernel": fused})
    with shipping(monkeypatch, flash=EITHER):
        plan = ma.plan(LARGE, named, None, V6E)  # whatever the parts of dQ take
    sizes = blocks_of(plan.kernel)
    assert sizes.part(FORWARD) == sizes.part(DKV) == (1024, 1024, 1024)
    assert sizes.use_fused_bwd_kernel == fused
    assert blocks_of(plan.kernel.for_inference()) == BlockSizes(1024, 1024, 1024)
    assert any("estimated" in note for note in plan.notes)


def test_a_backward_that_a_kernel_lacks_is_said():
    separate = {"use_fused_bwd_kernel": False}
    named = FLASH.replace(attention="tokamax_flash", flash_block_sizes=separate)
    plan = ma.plan(CALL, named, None, TOKAMAX)
    assert "use_fused_bwd_kernel: False → True" in plan.explain()


def test_measured_sizes_win_over_the_shipped_estimates(monkeypatch):
    sizes = (("block_q", 256), ("block_kv", 256), ("block_kv_compute", 256))
    measured = Tuned("flash", key_of(CALL), sizes, 9.0, True, "tuned.json")
    with shipping(monkeypatch, flash=costs(100, 350)):
        plan = ma.plan(CALL, FLASH, None, replace(V6E, tuned=(measured,)))
    assert blocks_of(plan.kernel).block_q == 256
    assert not any("libtpu" in note for note in plan.notes)


TOKAMAX = Target.named(KIND, (("tokamax", "0.0.17"),))
SLOWER, FASTER = costs(90, 300, waits=60, fused=True), costs(50, 120, waits=10, fused=True)


@pytest.mark.parametrize(
    ("name", "tokamax", "runs"),
    [("surely_faster", FASTER, "tokamax_flash"), ("overlapping", SLOWER, "flash")],
)
def test_auto_takes_another_kernel_only_beyond_doubt(monkeypatch, name, tokamax, runs):
    with shipping(monkeypatch, flash=costs(100, 350, waits=10), tokamax_flash=tokamax):
        plan = ma.plan(CALL, AUTO, None, TOKAMAX)
        assert plan.kernel.name == runs
        check_golden(f"explain/kernels_{name}", plan.explain())


# A tile of 2,048 has a fourth of the steps of one of 1,024, whose forward takes 350 bundles.
OWN = {"tpu_flash": own_costs(700, 1000), "large_scores": own_costs(700, 1500)}


@pytest.mark.parametrize(
    ("name", "runs"), [("tpu_flash", "tpu_flash"), ("large_scores", "flash/tpu_flash")]
)
def test_auto_takes_tpu_flash_where_neither_softmax_is_slower(monkeypatch, name, runs):
    with shipping(monkeypatch, flash=costs(100, 350, waits=10), tpu_flash=OWN[name]):
        plan = ma.plan(CALL, AUTO, None, V6E)
        check_golden(f"explain/kernels_{name}", plan.explain())
        wide = ma.plan(CALL, AUTO.replace(float32_qk_product=True), None, V6E)
    with shipping(monkeypatch, flash=costs(100, 350, waits=10), tpu_flash=own_costs(700, 1420)):
        overlapping = ma.plan(CALL, AUTO, None, V6E)  # a step of flash: 4 times 350 to 360
    assert (plan.kernel.name, overlapping.kernel.name) == (runs, "tpu_flash")
    assert wide.kernel.name == "flash" and "128 in float32" in wide.because


def test_auto_takes_the_fastest_of_several_kernels(monkeypatch):
    tokamax = costs(1, 2, fused=True)  # the parts of dQ that its backward writes bind it
    fastest = {"tpu_flash": own_costs(700, 1000), "tokamax_flash": tokamax}
    with shipping(monkeypatch, flash=costs(100, 350), **fastest):
        plan = ma.plan(CALL, AUTO, None, TOKAMAX)
        alone = ma.plan(CALL, AUTO, None, V6E)
    assert (plan.kernel.name, alone.kernel.name) == ("tokamax_flash/tpu_flash", "tpu_flash")
    assert {reason.who for reason in alone.refused} == {"tokamax_flash"}


def test_tiles_of_estimates_run_in_both_passes(monkeypatch):
    with shipping(monkeypatch, tpu_flash=own_costs(700, 1000, side=1024)):
        kernel = ma.plan(CALL, OWN_KERNEL, None, V6E).kernel
        assert kernel.for_inference().blocks == BlockSizes(1024, 1024, 512)
        assert blocks_of(kernel).part(DKV) == (1024, 1024, 512)
        padded = ma.plan(replace(CALL, q_len=8193, kv_len=8193), OWN_KERNEL, None, V6E)
    # Blocks of 1,024 would pad it to 9,216, and those of the rules, 1,664, to 8,320.
    assert blocks_of(padded.kernel).block_q == 1664


BEYOND = {
    "mask": replace(CALL, mask=M.Causal().bind(8192, 8192, 1, 2).form()),
    "head_dim": replace(CALL, head_dim=96),
    "dtype": replace(CALL, dtype="float32"),
    "one_tile": replace(CALL, kv_len=512),
}


def test_a_plan_says_why_no_estimates_hold(monkeypatch):
    with shipping(monkeypatch, flash=costs(100, 350), tpu_flash=own_costs(700, 1000)):
        plans = {name: ma.plan(call, AUTO, None, V6E) for name, call in BEYOND.items()}
        assert all(estimated_sizes("flash", call, V6E, True) is None for call in BEYOND.values())
        assert estimated_sizes("flash", CALL, V6E, True) is not None
        assert estimated_sizes("flash", CALL, Target.named("TPU v5p"), True) is None
    names = [plan.kernel.name for plan in plans.values()]
    assert names == ["flash", "flash", "flash", "tpu_few_keys"]
    check_golden("explain/not_estimated", "\n".join(f"{n}: {p.because}" for n, p in plans.items()))


def test_a_faster_kernel_is_taken_where_it_is_installed_and_its_parts_fit(monkeypatch):
    with shipping(monkeypatch, flash=costs(100, 350), tokamax_flash=FASTER):
        missing, large = ma.plan(CALL, AUTO, None, V6E), ma.plan(LARGE, AUTO, None, TOKAMAX)
    assert missing.kernel.name == "flash"
    assert [reason.who for reason in missing.refused] == ["tokamax_flash"]
    assert large.kernel.name == "tokamax_flash/flash" and "too much memory" in large.because


# Bundles of tpu_flash's forward and online softmax; its backward takes twice as many as the first.
TIES = {
    "both": ((970, 1270), "tpu_flash", "backward tpu_flash, which is as fast, without partial dQ"),
    "forward": (
        (970, 1700),
        "flash/tpu_flash",
        "backward tpu_flash, which is as fast, without partial",
    ),
    "slower": (
        (1100, 1300),
        "tpu_flash/flash",
        "forward tpu_flash, which is faster; backward flash",
    ),
}


@pytest.mark.parametrize("name", TIES)
def test_a_tie_spares_the_parts_of_dq(monkeypatch, name):
    bundles, runs, because = TIES[name]
    with shipping(monkeypatch, flash=EITHER, tpu_flash=own_costs(*bundles)):
        plan = ma.plan(CALL, AUTO, None, V6E)
    assert plan.kernel.name == runs and because in plan.because
