"""The grid that auto's costs are fitted on: what is drawn, measured, read and fitted."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from maxattn import masks as M
from maxattn.devices import DEVICES
from maxattn.kernels import computed_call
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD, terms
from maxattn.kernels.auto.measured import TABLE
from maxattn.kernels.auto.predict import FittedCosts, head_class, weighed
from maxattn.target import Target
from maxattn.tools.bench.auto_table import NewTable, write
from maxattn.tools.bench.grid import call_timing
from maxattn.tools.bench.grid import draw as drawing
from maxattn.tools.bench.grid import fit as fitting
from maxattn.tools.bench.grid import left_out as judging
from maxattn.tools.bench.grid import run as running
from maxattn.tools.bench.grid.calls import KINDS, LENGTHS, SEGMENTS, GridCall
from maxattn.tools.bench.grid.job import GridJob
from maxattn.tools.bench.grid.report import against_best
from maxattn.tools.bench.grid.rows import GridRow, merged, read_rows, to_file
from maxattn.tools.bench.grid.run import run_grid
from maxattn.tools.cli import bench_grid
from tests.tools.cli.command import run

H200 = DEVICES["NVIDIA H200"]
PACKAGES = (("tokamax", "0.0.17"), ("fa4-jax", "0.1.0"), ("transformer-engine-jax", "2.20.2"))
TARGET = Target("gpu", "NVIDIA H200", PACKAGES)
DRAWN = drawing.draw(3, 100)
SMALL = GridCall((1, 64, 64, 2, 2, 16))


# ---- what is drawn -------------------------------------------------------------------------------


def test_a_seed_draws_the_same_calls_of_every_kind() -> None:
    assert drawing.draw(3, 100) == DRAWN != drawing.draw(4, 100)
    assert set(Counter(call.kind for call in DRAWN)) == set(KINDS)
    assert {call.sizes[5] for call in DRAWN} == set(drawing.HEAD_DIMS)
    assert {call.dtype for call in DRAWN} == {"bf16", "f16"}
    assert any(call.sizes[3] != call.sizes[4] for call in DRAWN), "heads that share keys"
    ratios = [call.sizes[1] / call.sizes[2] for call in DRAWN]
    assert min(ratios) < 0.1 and max(ratios) > 10 and ratios.count(1.0) > 30


def test_what_is_drawn_is_a_moment_s_work() -> None:
    for call in DRAWN:
        b, t, s, n, k, h = call.sizes
        assert 4 * call.pairs * h <= drawing.MOST_WORK and call.bytes <= drawing.MOST_BYTES
        assert drawing.LEAST <= min(t, s) <= max(t, s) <= drawing.MOST and n % k == 0
        assert b * n <= drawing.MOST_ROWS


@pytest.mark.parametrize("call", DRAWN, ids=lambda call: call.name)
def test_a_drawn_call_is_one_and_reads_back(call: GridCall) -> None:
    made = call.shape().call()
    assert (made.q_len, made.kv_len) == call.sizes[1:3]
    assert made.mask.is_full == (call.kind == "full")
    assert GridCall.of_json(json.loads(json.dumps(call.to_json()))) == call


def test_models_shapes_are_calls_of_the_fitting_grid() -> None:
    found = drawing.fitting_calls()
    assert found[len(drawing.shapes()) :] == drawing.draw(drawing.FIT_SEED, drawing.FIT_CALLS)
    assert [c.sizes for c in found[:1]] == [(16, 4096, 77, 10, 10, 64)]
    assert any(c.kind == "block window" and c.numbers == (1560, 7) for c in found[:12])


# ---- what is measured ----------------------------------------------------------------------------


def test_short_calls_are_timed_behind_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_timing, "inputs_of", lambda call: 2)
    asked = []
    times = lambda *given: asked.append(given) or [(0.5, 2.0, 0.7)] * len(given[0])  # noqa: E731
    monkeypatch.setattr(call_timing, "seconds_behind", times)
    job = GridJob(tmp_path, (SMALL,), 0.5, 1, 0.0, ("dot_product",))
    row = call_timing.CompiledCall.of(job, 0, Target.here()).timed(job)
    assert not row.failed and set(row.times) == {FORWARD, BACKWARD}
    assert all(row.times[what] == {"dot_product": 700.0} for what in row.times)
    ((jobs, rounds),) = asked
    assert [p.name for p, _ in jobs] == ["jit_forward_dot_product", "jit_backward_dot_product"]
    assert rounds == call_timing.ROUNDS and [len(sets) for _, sets in jobs] == [2, 2]


def test_processes_measure_what_they_claim(tmp_path: Path) -> None:
    """Lengths and ids go in as arrays, as a program under jit has them."""
    calls = [replace(SMALL, kind=LENGTHS, numbers=(40,)), replace(SMALL, kind=SEGMENTS,
                                                                  numbers=(30, 34))]  # fmt: skip
    kept: list[list[GridRow]] = []
    rows = run_grid(calls, 0.01, 200, 1, tmp_path, ("dot_product", "cudnn"), keep=kept.append)
    assert {row.call for row in rows} == set(calls)
    assert kept and all(row in rows for row in kept[0]), "what is measured so far is kept"
    assert all(row.times[what]["dot_product"] > 0 for row in rows for what in (FORWARD, BACKWARD))
    assert all(set(row.forward) == {"dot_product"} for row in rows), "no cuDNN on a CPU"
    assert {row.device for row in rows} == {"cpu"} and len(list(tmp_path.glob("claim-*"))) == 2


def test_a_row_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path, whole = tmp_path / "rows-0.jsonl", row_of(SMALL, 1.0, 2.0)
    text = json.dumps(whole.to_json() | {"device": whole.device})
    for half in ("", text[:30], text[: text.index("}") + 1]):
        path.write_text(f"{text}\n{half}")
        assert read_rows([path]) == [whole]
    path.write_text("")
    assert read_rows([path]) == []


def test_what_is_measured_so_far_stands_beside_an_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is cut off leaves the earlier file and its own rows; a whole one, its own."""
    path, rows = tmp_path / "grid.json", [replace(row_of(SMALL, 1.0, 2.0), device="cpu")]
    path.write_text("earlier")
    args = argparse.Namespace(json=path, seconds=0.01, limit=1.0, kernel=(), peers=False)
    beside = tmp_path / "grid.partial.json"

    def ended(*_: object, keep: Callable[[list[GridRow]], None], **__: object) -> list[GridRow]:
        keep(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_grid", ended)
    with pytest.raises(KeyboardInterrupt):
        bench_grid._measured(args, Target.here(), [SMALL])
    assert path.read_text() == "earlier" and read_rows([beside]) == rows

    def whole(*_: object, keep: Callable[[list[GridRow]], None], **__: object) -> list[GridRow]:
        monkeypatch.setattr(bench_grid, "write_whole", full_disk)
        keep(rows)
        monkeypatch.undo()
        return rows

    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(running, "run_grid", whole)
    assert bench_grid._measured(args, Target.here(), [SMALL]) == rows
    assert read_rows([path]) == rows and not beside.exists()
    assert "so far was not kept: no space left" in capsys.readouterr().err


def test_no_time_leaves_no_rows(tmp_path: Path) -> None:
    assert run_grid([SMALL], 0.01, 0.5, 1, tmp_path, ("dot_product",)) == []


# ---- what is read --------------------------------------------------------------------------------


def row_of(call: GridCall, forward: float, backward: float, who: str = "flash") -> GridRow:
    return GridRow(call, {FORWARD: {who: forward}, BACKWARD: {who: backward}}, device="NVIDIA H200")


def test_a_later_file_replaces_times_and_takes_them_back(tmp_path: Path) -> None:
    """Of one file's rows of a call the median counts; null is for a kernel launched otherwise."""
    first, again = (tmp_path / x for x in ("first.json", "again.json"))
    before = row_of(SMALL, 1.0, 2.0), row_of(SMALL, 3.0, 4.0), row_of(SMALL, 5.0, 5.0, "cudnn")
    first.write_text(to_file(before, {"device": "NVIDIA H200"}))
    null: dict = {FORWARD: {"flash": 7.0}, BACKWARD: {"flash": None}}
    again.write_text(to_file([GridRow(SMALL, null)], {"device": "NVIDIA H200"}))
    (row,), (alone,) = read_rows([first, again]), read_rows([again])
    assert row.times == {FORWARD: {"flash": 7.0, "cudnn": 5.0}, BACKWARD: {"cudnn": 5.0}}
    assert alone.times == {FORWARD: {"flash": 7.0}, BACKWARD: {}}
    (row,) = read_rows([first])
    assert row.times == {
        FORWARD: {"flash": 2.0, "cudnn": 5.0},
        BACKWARD: {"flash": 3.0, "cudnn": 5.0},
    }


def test_of_settings_about_as_good_near_calls_reach_least_far() -> None:
    def its(mean: float) -> judging.Regret:
        return judging.Regret(*(np.array([1 + mean]) for _ in range(2)))

    made = {
        reach: judging.ChoiceSettings(reach and fitting.NearSettings(reach, 0.1), judging.Margins())
        for reach in (None, 1.0, 2.0)
    }
    means = {None: 0.0021, 1.0: 0.0022, 2.0: 0.002}
    assert judging._best({made[x]: its(mean) for x, mean in means.items()}) == made[1.0]
    means[1.0] = 0.003
    assert judging._best({made[x]: its(mean) for x, mean in means.items()}) == made[2.0]


def test_rows_of_a_grid_and_of_bench_are_read(tmp_path: Path) -> None:
    lines, grid, bench = (tmp_path / x for x in ("rows-0.jsonl", "grid.json", "bench.json"))
    lines.write_text(json.dumps(row_of(SMALL, 1.0, 2.0).to_json()) + "\n")
    grid.write_text(to_file([row_of(SMALL, 3.0, 6.0)], {"device": "NVIDIA H200"}))
    a_row = {"shape": "sdxl-64", "who": "cudnn", "what": "forward", "ms": 1.5}
    of_auto = a_row | {"who": "auto"}
    runs = {"a run": {"machine": {"device": "NVIDIA H200"}, "rows": [a_row, of_auto]}}
    bench.write_text(json.dumps(runs))
    mine, theirs = read_rows([lines, grid, bench])
    assert mine.call == SMALL and mine.times == {FORWARD: {"flash": 3.0}, BACKWARD: {"flash": 6.0}}
    assert theirs.call.sizes == (16, 4096, 4096, 10, 10, 64) and theirs.device == "NVIDIA H200"
    assert theirs.times == {FORWARD: {"cudnn": 1.5}, BACKWARD: {}}


def test_a_call_measured_twice_is_one_row() -> None:
    rows = [row_of(SMALL, 1.0, 2.0), row_of(SMALL, 3.0, 2.0), row_of(SMALL, 9.0, 2.0, "cudnn")]
    (found,) = merged(rows)
    assert found.forward == {"flash": 2.0, "cudnn": 9.0}


# ---- what is fitted ------------------------------------------------------------------------------

TRUE = {"launch": 9.0, "waves": 1.2, "exps": 0.8, "bytes": 1.1, "passes": 1.4, "tested": 3.0}
TRUE |= {"copies": 1.0}


def made_rows(factors: dict[str, float]) -> list[GridRow]:
    """Rows whose times are sums of the terms, by weights that are known."""
    rows = []
    for call in DRAWN:
        asked = {who: computed_call(who, call.shape().call(), "gpu") for who in factors}
        times = {
            what: {
                who: factor * weighed(TRUE, terms(who, what, asked[who], H200, call.known))
                for who, factor in factors.items()
            }
            for what in (FORWARD, BACKWARD)
        }
        rows.append(GridRow(call, times, device="NVIDIA H200"))
    return rows


def test_known_weights_are_found() -> None:
    rows = made_rows({"flash": 1.0, "tokamax_flash": 1.0})
    found = fitting.samples(rows, H200)
    out = judging.left_out(found, 5)
    assert out.median < 1e-3
    weights = fitting.fitted(found).weights
    assert all(x >= 0 for its in weights.values() for x in its.values())
    assert weights["flash", FORWARD, 128]["waves"] == pytest.approx(1.2, rel=0.05)


def test_a_fit_says_whether_it_decides() -> None:
    """Where the fastest kernel depends on more than the nearest shape, the fit is the better."""
    found = judging.fit(made_rows({"flash": 1.0, "tokamax_flash": 1.0}), H200, 5)
    assert (
        found.costs.decides
        and "taken: " in found.text
        and "the smallest prediction: forward median" in found.text
    )
    noise = np.random.default_rng(0)
    unlike = [
        replace(row, times={w: {k: float(noise.lognormal(0, 3)) for k in t} | {"flash": 1e-9}
                            for w, t in row.times.items()})
        for row in made_rows({"tokamax_flash": 1.0, "cudnn": 1.0})
    ]  # fmt: skip
    assert judging.regret(unlike, lambda row, what: "flash").forward.max() == 1.0
    worse = judging.regret(unlike, lambda row, what: "cudnn")
    assert np.median(worse.forward) > 1 and (np.diff(worse.both) >= 0).all()


def slowed(row: GridRow) -> GridRow:
    call = computed_call("cudnn", fitting.call_of(row), "gpu")
    by_lengths = np.exp(np.sin(np.log2(call.q_len * call.kv_len) / 4))
    factor = {"flash": 1.0, "cudnn": by_lengths * (call.batch * call.heads) ** 0.1}
    passes = row.times.items()
    return replace(row, times={w: {n: ms * factor[n] for n, ms in x.items()} for w, x in passes})


def test_what_the_terms_do_not_know_is_taken_from_near_calls() -> None:
    """A library whose rate depends on more than its work."""
    rows = [slowed(row) for row in made_rows({"flash": 1.0, "cudnn": 0.8})]
    found = fitting.samples(rows, H200)
    alone, near = (judging.left_out(found, 5, x) for x in (None, fitting.NearSettings(2, 0.1)))
    errors = [x.errors["cudnn", FORWARD].mean() for x in (alone, near)]
    assert errors[1] < 0.8 * errors[0]
    costs = fitting.fitted(found, fitting.NearSettings(2, 0.1))
    back = FittedCosts.of_json(json.loads(json.dumps(costs.to_json())))
    call = fitting.call_of(rows[7])
    ours, read = (x.predict_all(["flash", "cudnn"], FORWARD, call, H200) for x in (costs, back))
    assert read == pytest.approx(ours, rel=0.01)
    assert ours["cudnn"] == pytest.approx(rows[7].forward["cudnn"], rel=0.3)


def test_costs_read_back_and_are_written_beside_what_is_there(tmp_path: Path) -> None:
    costs = FittedCosts({("flash", FORWARD, 64): {"launch": 2.0, "none": 0.0}}, 0.04, 7, True)
    back = FittedCosts.of_json(json.loads(json.dumps(costs.to_json())))
    assert back.weights == {("flash", FORWARD, 64): {"launch": 2.0}} and back.decides
    path = tmp_path / "table.json"
    write(NewTable("NVIDIA H200", {}, [], costs, {"NVIDIA H200": ["runs/a.json"]}), path)
    new, old = (json.loads(text)["NVIDIA H200"] for text in (path.read_text(), TABLE.read_text()))
    assert new["entries"] == old["entries"] and new["costs"]["weights"]["flash"]
    assert new["costs"]["measured_on"] == {"NVIDIA H200": ["runs/a.json"]}


def test_auto_is_held_against_the_best_of_all() -> None:
    rows = made_rows({"flash": 1.0, "cudnn": 3.0, "tokamax_flash": 2.0})
    bare = [replace(r, times=r.times | {FORWARD: r.forward | {"bare x": 1e-9}}) for r in rows]
    text = against_best(rows, TARGET)
    assert "auto over the best" in text and "both" in text
    assert "forward median 1.000" in text and "forward median 1.000" not in against_best(
        bare, TARGET
    )
    assert against_best([], TARGET) == "nothing was measured that auto takes"


def test_differences_up_to_three_microseconds_count_as_none() -> None:
    assert judging.over(0.0129, 0.01) == 1.0
    assert judging.over(0.0131, 0.01) == pytest.approx(1.31)


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_fits_rows_and_writes_the_table(tmp_path, capsys) -> None:
    rows, table = tmp_path / "rows.json", tmp_path / "table.json"
    rows.write_text(to_file(made_rows({"flash": 1.0, "cudnn": 2.0}), {"device": "NVIDIA H200"}))
    ran = run(capsys, "bench", "--fit", str(rows), "--write-table", str(table))
    assert ran.status == 0 and "the nearest measured shape: forward" in ran.out
    costs = json.loads(table.read_text())["NVIDIA H200"]["costs"]
    assert costs["calls"] == len(DRAWN) and set(costs["weights"]) == {"flash", "cudnn"}
    assert head_class(72) == 96


def test_the_command_holds_auto_against_rows_of_a_file(tmp_path, capsys) -> None:
    rows = tmp_path / "rows.json"
    made = made_rows({"flash": 1.0, "cudnn": 2.0})[:7]
    machine = {"device": "NVIDIA H200", "packages": dict(PACKAGES)}
    rows.write_text(to_file(made, machine))
    ran = run(capsys, "bench", "--against", str(rows))
    assert ran.status == 0 and ran.out.splitlines()[0].split()[-1] == "B,T,S,N,H"
    assert " of 7 calls" in ran.out and " flash " in ran.out
    without = {"device": "NVIDIA H200", "packages": {}}
    rows.write_text(to_file(made, without))
    assert " flash " not in run(capsys, "bench", "--against", str(rows)).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--grid 1", "the grid is of the kernels of NVIDIA GPUs"),
        ("--grid -1", "a seed is a number from 0"),
        ("--grid 1 --write-table t.json", "takes no part in its table"),
        ("--fit {here}/none.json", "it reads what bench measured"),
        ("--fit {here}/no.json", "these are of none"),
        ("--grid 1 -2", "a seed is a number from 0"),
        ("--grid 1 --limit 0", "it is seconds above 0"),
        ("--limit 60", "it is read with --grid"),
        ("--against {here}/no.json --grid 1", "measures and fits nothing"),
        ("--against {here}/none.json", "it reads what bench measured"),
        ("--against {here}/rows-0.jsonl", "on which machine its rows were measured"),
    ],
)
def test_what_is_refused(words: str, said: str, tmp_path, capsys) -> None:
    (tmp_path / "no.json").write_text('{"rows": []}')
    row = GridRow(SMALL, {FORWARD: {"flash": 1.0}, BACKWARD: {"flash": 1.0}}).to_json()
    (tmp_path / "rows-0.jsonl").write_text(json.dumps(row | {"device": "NVIDIA H200"}))
    ran = run(capsys, "bench", *words.format(here=tmp_path).split())
    assert ran.status == 1 and said in ran.err and ran.out == ""


def test_masks_of_the_grid_are_those_they_are_called() -> None:
    assert GridCall((1, 8, 8, 1, 1, 8), kind="window", numbers=(2, 0)).mask() == M.LocalWindow(2, 0)
    ids = GridCall((2, 5, 5, 1, 1, 8), kind=SEGMENTS, numbers=(2, 3)).mask()
    assert np.array_equal(np.asarray(ids.segment_ids()[0])[1], [0, 0, 1, 1, 1])  # type: ignore[index]


def test_a_process_that_keeps_the_device_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(running, "STUCK", 0.1)
    keeps, waits = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    holder = tmp_path / "holder"
    try:
        running._end_stuck([keeps, waits], holder)  # nobody holds it
        holder.write_text(str(keeps.pid))
        time.sleep(0.2)
        running._end_stuck([keeps, waits], holder)
        assert keeps.wait(10) != 0 and waits.poll() is None and not holder.exists()
    finally:
        keeps.kill()
        waits.kill()
        waits.wait()
