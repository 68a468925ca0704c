"""`auto` by predicted times: they grow with the work, choose passes apart, and keep close to the
best that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.devices import DEVICES, device_of
from maxattn.kernels import refusal
from maxattn.kernels.auto import gpu, measured
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD, terms
from maxattn.kernels.auto.near import NearCalls, coordinates
from maxattn.kernels.auto.predict import HEAD_CLASSES, FittedCosts, Margins
from maxattn.tools.bench.grid.draw import draw
from maxattn.tools.bench.grid.fit import call_of
from maxattn.tools.bench.grid.left_out import by_nearest, regret
from maxattn.tools.bench.grid.rows import GridRow, is_ours, read_rows

ROOT = Path(__file__).parents[2]
PACKAGES = (("tokamax", "0.0.17"), ("fa4-jax", "0.1.0"), ("transformer-engine-jax", "2.20.2"))
TARGET = ma.Target("gpu", "NVIDIA H200", PACKAGES)
H200 = DEVICES["NVIDIA H200"]
CALLS = [row.shape().call() for row in draw(11, 100)]
SHIPPED = gpu.read_costs()["NVIDIA H200"]
FUSED = ("cudnn", "cudnn_flash_te", "flash", "tokamax_flash")
CALL = ma.Call(4, 1000, 1000, 8, 8, 128, "bfloat16")


def costs_of(**launches: tuple[float, float]) -> FittedCosts:
    """Return costs of a launch alone: (forward, backward) ms by kernel."""
    weights = {
        (name, what, heads): {"launch": 1e3 * ms}
        for name, both in launches.items()
        for what, ms in zip((FORWARD, BACKWARD), both, strict=True)
        for heads in HEAD_CLASSES
    }
    return FittedCosts(weights, 0.04, 212, decides=True)


@pytest.fixture
def by_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    costs = costs_of(
        flash=(0.3, 0.5), cudnn=(0.2, 0.9), tokamax_flash=(0.25, 1.0), dot_product=(0.1, 0.1)
    )
    monkeypatch.setattr(gpu, "read_costs", lambda: {"NVIDIA H200": costs})
    monkeypatch.setattr(gpu, "costs_measured_on", lambda: {"NVIDIA H200": {"NVIDIA H200": ()}})
    yield


# ---- more work takes more time -------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [*FUSED, "dot_product", "memory_efficient"])
@pytest.mark.parametrize("mask", [M.Full(), M.Causal(), M.LocalWindow(200, 0)])
def test_no_time_gets_shorter_with_more_of_anything(kernel: str, mask: M.Mask) -> None:
    """Whatever weights a fit finds: every term grows, and no weight is negative."""
    first = ma.Call(2, 1024, 1024, 4, 4, 64, "bfloat16", mask)
    more = [
        replace(first, batch=4),
        replace(first, heads=8, kv_heads=8),
        replace(first, q_len=2048, kv_len=2048),
    ]
    for what in (FORWARD, BACKWARD):
        before = terms(kernel, what, first, H200)
        for call in more:
            after = terms(kernel, what, call, H200)
            # More queries may take tiles of other sizes, and cut fewer of them by a mask.
            less = {name for name in before if after[name] < before[name] * (1 - 1e-9)}
            assert less <= {"tested", "starts"}, (call, less)
            assert sum(after.values()) > sum(before.values())


def test_weights_are_not_negative_and_errors_are_said() -> None:
    assert all(x > 0 for its in SHIPPED.weights.values() for x in its.values())
    assert 0 < SHIPPED.error < 0.5 and SHIPPED.calls > 10
    assert {kernel for kernel, _, _ in SHIPPED.weights} >= set(FUSED)


def test_masks_take_less_and_their_tests_more() -> None:
    long = replace(CALL, q_len=8192, kv_len=8192)
    full, causal = (
        terms("flash", FORWARD, replace(long, mask=m.bind(8192, 8192)), H200)
        for m in (M.Full(), M.Causal())
    )
    assert 0.5 < causal["tiles"] / full["tiles"] < 0.55
    assert full["tested"] == 0 < causal["tested"]
    ids = M.Segments(np.zeros((4, 8192), int), np.zeros((4, 8192), int)).bind(8192, 8192)
    segments = terms("flash", FORWARD, replace(long, mask=ids), H200)
    assert segments["looked_up"] == segments["tested"] > causal["tested"], "both ends of a segment"
    assert causal["looked_up"] == 0


def test_the_last_wave_counts_whole() -> None:
    """132 thread blocks are one wave, 133 are two, and take no more of the chip on average."""
    one, two = (terms("cudnn", FORWARD, replace(CALL, batch=b, q_len=128, heads=1, kv_heads=1),
                      H200) for b in (132, 133))  # fmt: skip
    assert two["waves"] == pytest.approx(2 * one["waves"])
    assert two["tiles"] == pytest.approx(133 / 132 * one["tiles"])


def test_a_smaller_gpu_has_more_waves() -> None:
    small = device_of("NVIDIA H20")
    assert small.sms < H200.sms
    ours, theirs = (terms("cudnn", FORWARD, CALL, device) for device in (H200, small))
    assert theirs["starts"] > ours["starts"]


def test_a_split_backward_has_fewer_steps_in_its_waves() -> None:
    cross = ma.Call(1, 32760, 512, 12, 12, 128, "bfloat16")
    flash, cudnn = (terms(k, BACKWARD, cross, H200) for k in ("flash", "cudnn"))
    assert flash["waves"] < 0.7 * cudnn["waves"]


@pytest.mark.parametrize(
    ("sizes", "mask", "what"),
    [
        ((2, 54016, 257, 2, 2, 128), M.Causal(0), BACKWARD),
        ((2, 54016, 257, 4, 2, 128), M.LocalWindow(50000, 9, offset=0), BACKWARD),
        ((1, 512, 32768, 12, 12, 128), M.LocalWindow(16000, 0), FORWARD),
    ],
)
def test_few_thread_blocks_of_a_mask_take_less_in_splits(
    sizes: tuple[int, ...], mask: M.Mask, what: str
) -> None:
    call = ma.Call(*sizes, "bfloat16", mask=mask.bind(*sizes[1:3]))
    flash, cudnn = (terms(k, what, call, H200) for k in ("flash", "cudnn"))
    names = "waves", "longest", "starts"
    assert all(flash[name] < 0.7 * cudnn[name] for name in names)


# ---- what is chosen ------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_launches")
def test_passes_are_chosen_apart_and_the_next_best_is_said() -> None:
    names, because = gpu.order(CALL, TARGET)
    assert names[0] == "dot_product" and refusal(names[0], CALL, TARGET) is None
    many = replace(CALL, batch=64)  # so many scores that plain JAX was not measured
    names, because = gpu.order(many, TARGET)
    assert names[0] == "cudnn/flash"
    assert because == (
        "predicted forward cudnn 0.2 ms, tokamax_flash 0.25; backward flash 0.5 ms, cudnn 0.9;"
        " 4% median error on 212 calls left out of the fit, measured on an NVIDIA H200"
    )


def test_far_longer_calls_than_were_measured_go_by_the_nearest_shape() -> None:
    for length, by in ((2**18, "predicted forward"), (2**18 + 1, "the nearest shape")):
        _, because = gpu.order(replace(CALL, q_len=length, kv_len=length), TARGET)
        assert by in because, length


def test_the_usual_kernel_is_left_for_a_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(flash=(0.3, 0.5), cudnn=(0.28, 0.3))
    cases = ((0.0, 0.0), "cudnn"), ((0.1, 0.1), "flash/cudnn"), ((0.5, 0.5), "flash")
    for pair, first in (*cases, ((0.0, 0.5), "cudnn/flash")):
        margins = Margins(*pair)
        usual = replace(costs, usual="flash", margins=margins)
        assert FittedCosts.of_json(usual.to_json()).margins == margins
        monkeypatch.setattr(gpu, "read_costs", lambda usual=usual: {"NVIDIA H200": usual})
        names, because = gpu.order(replace(CALL, batch=64), TARGET)
        assert names[0] == first
        assert ("flash unless another takes" in because) == any(margins)


def test_a_measured_call_goes_by_its_times_and_others_by_less_of_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuDNN is predicted to take 7% less forward: a margin of 10% hides that of far calls alone."""
    call = replace(CALL, batch=64)
    near = NearCalls(1.0, np.array([coordinates(call)]))
    costs = costs_of(flash=(0.3, 0.3), cudnn=(0.28, 0.5))
    costs = replace(costs, usual="flash", margins=Margins(0.1, 0.1), near=near)
    monkeypatch.setattr(gpu, "read_costs", lambda: {"NVIDIA H200": costs})
    for batch, first, said in (
        (64, "cudnn/flash", ""),  # the measured call itself
        (80, "cudnn/flash", "flash unless another takes 3% less"),  # a third of a doubling away
        (1024, "flash", "flash unless another takes 10% less forward, 10% less backward"),
    ):
        names, because = gpu.order(replace(call, batch=batch), TARGET)
        assert names[0] == first, batch
        assert said in because and ("unless" in because) is bool(said)


@pytest.mark.usefixtures("by_launches")
def test_a_kernel_that_is_refused_is_not_said_to_be_next() -> None:
    window = M.BlockSlidingWindow(100, 3).bind(1000, 1000)
    names, because = gpu.order(replace(CALL, batch=64, mask=window), TARGET)
    assert names[0] == "tokamax_flash/flash" and "cudnn" not in because
    bare = ma.Target("gpu", "NVIDIA H200")
    names, because = gpu.order(replace(CALL, batch=64), bare)
    assert names[0] == "cudnn" and "flash would be faster: add --with fa4" in because


@pytest.mark.usefixtures("by_launches")
def test_what_no_kernel_takes_is_plain_jax_and_says_why() -> None:
    pairs = M.Dense(np.zeros((4096, 4096), bool)).bind(4096, 4096)
    call = ma.Call(2, 4096, 4096, 8, 8, 64, "bfloat16", pairs)
    names, because = gpu.order(call, TARGET)
    assert because.startswith("plain JAX, since") and names[0] == "flash"
    few = replace(call, heads=1, kv_heads=1)
    assert gpu.order(few, TARGET)[0][0] == "dot_product"


@pytest.mark.usefixtures("by_launches")
def test_another_hopper_gpu_says_where_it_was_measured() -> None:
    """One with measured shapes of its own, and one without."""
    for kind in ("NVIDIA H100", "NVIDIA H20"):
        _, because = gpu.order(CALL, ma.Target("gpu", kind, PACKAGES))
        assert because.endswith(f"measured on an NVIDIA H200, and this is {kind}")


@pytest.mark.usefixtures("by_launches")
def test_costs_of_two_kinds_of_device_name_both(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = dict.fromkeys(("NVIDIA H200", "NVIDIA H100 80GB HBM3"), ())
    monkeypatch.setattr(gpu, "costs_measured_on", lambda: {"NVIDIA H200": kinds})
    both = "measured on an NVIDIA H200 and an NVIDIA H100"
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100"):
        target = ma.Target("gpu", kind, PACKAGES)
        found = gpu.forward_ms("cudnn", CALL, target)
        assert gpu.order(CALL, target)[1].endswith(f", {both}")
        assert found is not None and found.how.endswith(f"from times {both}")
    for kind in ("NVIDIA H20", "NVIDIA H100 PCIe"):
        because = gpu.order(CALL, ma.Target("gpu", kind, PACKAGES))[1]
        assert because.endswith(f"{both}, and this is {kind}")


@pytest.mark.usefixtures("by_launches")
def test_a_measured_call_takes_its_own_times() -> None:
    entry = gpu.read_tables()["NVIDIA H200"][0]
    b, t, s, n, h = entry.shape
    call = ma.Call(b, t, s, n, n, h, "bfloat16")
    because = gpu.order(call, TARGET)[1]
    assert "as measured on an NVIDIA H200" in because and "predicted" not in because
    lengths = M.KeyPadding(np.full(b, 9)).bind(t, s, b)
    for other in (replace(call, dtype="float16"), replace(call, mask=lengths)):
        assert gpu.order(other, TARGET)[1].startswith("predicted forward")


def test_costs_that_do_not_decide_leave_the_nearest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = replace(costs_of(cudnn=(0.1, 0.1)), decides=False)
    monkeypatch.setattr(gpu, "read_costs", lambda: {"NVIDIA H200": costs})
    assert "the nearest shape measured on" in gpu.order(CALL, TARGET)[1]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_every_drawn_call_has_an_order(call: ma.Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read_costs", lambda: {"NVIDIA H200": replace(SHIPPED, decides=True)})
    names, because = gpu.order(call, TARGET)
    assert because.startswith("predicted forward") and set(gpu.PLAIN) <= set(names)
    first = next(name for name in names if refusal(name, call, TARGET) is None)
    chosen = first.split("/")
    assert f"forward {chosen[0]} " in because and f"backward {chosen[-1]} " in because


def test_a_plan_predicts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counting(self: FittedCosts, kernels: Iterable[str], what: str, *rest) -> dict[str, float]:
        asked.append(what)
        return dict.fromkeys(kernels, 1.0)

    monkeypatch.setattr(gpu, "read_costs", lambda: {"NVIDIA H200": replace(SHIPPED, decides=True)})
    monkeypatch.setattr(FittedCosts, "predict_all", counting)
    call = replace(CALL, q_len=1234)
    assert ma.plan(call, target=TARGET) is ma.plan(call, target=TARGET)
    assert asked == [FORWARD, BACKWARD]


# ---- beside what was measured --------------------------------------------------------------------


def shipped_rows() -> list[GridRow]:
    """Read the rows that the shipped costs are fitted on."""
    on = measured.costs_measured_on()["NVIDIA H200"]
    return read_rows(ROOT / file for files in on.values() for file in files)


def test_the_costs_were_measured_where_they_say() -> None:
    rows, on = shipped_rows(), measured.costs_measured_on()["NVIDIA H200"]
    assert len({(row.call, row.device) for row in rows}) == len(rows) == SHIPPED.calls
    assert {row.device for row in rows} == set(on)


def test_auto_keeps_close_to_the_best_of_the_shipped_rows() -> None:
    rows = [row for row in shipped_rows() if all(map(row.times.get, (FORWARD, BACKWARD)))]
    targets = {row.device: replace(TARGET, device_kind=row.device) for row in rows}
    orders = {id(row): gpu.order(call_of(row), targets[row.device])[0] for row in rows}

    def of_auto(row: GridRow, what: str) -> str:
        """Name the first that was measured of what `auto` tries."""
        tried = (name.split("/")[0 if what == FORWARD else -1] for name in orders[id(row)])
        return next(name for name in tried if name in row.times[what] and is_ours(name))

    mine, nearest = regret(rows, of_auto), regret(rows, by_nearest(rows, lambda row: [
        other for other in rows if other is not row]))  # fmt: skip
    for found, other in zip(mine, nearest, strict=True):
        assert np.median(found) < 1.01
        if SHIPPED.decides:
            assert np.quantile(found, 0.95) < 1.15 and found.mean() <= other.mean()
