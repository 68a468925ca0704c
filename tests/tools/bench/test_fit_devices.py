"""Costs that are fitted to rows of several devices of one family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from maxattn.devices import device_of
from maxattn.kernels import computed_call
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD, terms
from maxattn.kernels.auto.measured import TABLE
from maxattn.tools.bench.auto_table import shapes
from maxattn.tools.bench.grid import draw as drawing
from maxattn.tools.bench.grid import fit as fitting
from maxattn.tools.bench.grid import left_out as judging
from maxattn.tools.bench.grid.calls import GridCall, of_shape
from maxattn.tools.bench.grid.rows import GridRow, files_by_device, read_rows, to_file
from tests.tools.cli.command import run

H200, H100, B200 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA B200"
CALL = GridCall((1, 64, 64, 2, 2, 16))
DRAWN = drawing.draw(3, 12)
SHAPES = [of_shape(shape) for shape in shapes()]
Times = dict[str, float | None]


def row_of(forward: Times, backward: Times, device: str = "", call: GridCall = CALL) -> GridRow:
    times: dict = {FORWARD: forward, BACKWARD: backward}
    return GridRow(call, times, device=device)


def rows_on(device: str, calls: list[GridCall]) -> list[GridRow]:
    """Rows whose times are the sums of the terms on a device."""
    found = []
    for call in calls:
        its = {who: computed_call(who, call.shape().call(), "gpu") for who in ("flash", "cudnn")}
        forward, backward = (
            {who: 1e-3 * sum(terms(who, what, its[who], device_of(device)).values()) for who in its}
            for what in (FORWARD, BACKWARD)
        )
        found.append(row_of({**forward}, {**backward}, device, call))
    return found


def written(path: Path, rows: list[GridRow], device: str) -> str:
    path.write_text(to_file(rows, {"device": device} if device else {}))
    return str(path)


# ---- what is read --------------------------------------------------------------------------------


def test_a_call_on_two_devices_is_two_rows(tmp_path: Path) -> None:
    """A later file replaces and takes back the times of its own device alone."""
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    whole = row_of({"flash": 1.0, "cudnn": 2.0}, {"flash": 3.0, "cudnn": 4.0})
    for path, device in zip(paths, (H200, H100), strict=False):
        written(path, [whole], device)
    written(paths[2], [row_of({"flash": 5.0}, {"flash": None})], H100)
    first, second = read_rows(paths)
    assert first == replace(whole, device=H200) and second.device == H100
    assert second.times == {FORWARD: {"flash": 5.0, "cudnn": 2.0}, BACKWARD: {"cudnn": 4.0}}
    assert files_by_device(paths) == {H200: paths[:1], H100: paths[1:]}


def test_a_file_may_hold_runs_of_two_devices(tmp_path: Path) -> None:
    path, row = tmp_path / "runs.json", row_of({"flash": 1.0}, {"flash": 2.0}).to_json()
    runs = {kind: {"machine": {"device": kind}, "rows": [row]} for kind in (H200, H100)}
    path.write_text(json.dumps(runs))
    assert [row.device for row in read_rows([path])] == [H200, H100]
    assert files_by_device([path]) == {H200: [path], H100: [path]}


def test_rows_without_a_device_are_of_the_first_that_a_file_names(tmp_path: Path) -> None:
    bare, named, other = (tmp_path / f"{name}.json" for name in ("bare", "named", "other"))
    written(bare, [row_of({"flash": 1.0}, {"flash": 2.0})], "")
    written(named, [row_of({"flash": 7.0}, {"flash": 8.0})], H200)
    written(other, [row_of({"flash": 9.0}, {"flash": 9.0})], H100)
    (row,) = read_rows([bare, named])
    assert row.device == H200 and row.forward == {"flash": 7.0}
    assert [row.device for row in read_rows([bare])] == [""]
    assert [row.forward["flash"] for row in read_rows([named, other, bare])] == [1.0, 9.0]


# ---- what is fitted ------------------------------------------------------------------------------


def test_a_row_has_the_terms_of_its_own_device() -> None:
    kinds = H200, "NVIDIA H20", ""
    rows = [row_of({"cudnn": 1.0}, {}, kind, DRAWN[0]) for kind in kinds]
    found = fitting.samples(rows, device_of("NVIDIA H20"))
    assert [each.terms for each in found] == [
        terms("cudnn", FORWARD, each.call, device_of(kind))
        for each, kind in zip(found, (H200, "NVIDIA H20", "NVIDIA H20"), strict=True)
    ]
    assert found[0].terms != found[1].terms == found[2].terms and found[0].real != found[1].real


def test_two_devices_are_fitted_as_well_as_one() -> None:
    calls = drawing.draw(3, 60)
    rows = [*rows_on(H200, calls), *rows_on("NVIDIA H20", calls)]
    alike = judging.left_out(fitting.samples(rows, device_of(H200)), 4)
    wrong = [replace(row, device=H200) for row in rows]
    assert alike.median < judging.left_out(fitting.samples(wrong, device_of(H200)), 4).median


@pytest.mark.parametrize("lacks", [FORWARD, BACKWARD])
def test_a_row_without_a_pass_of_a_kernel_is_not_judged(lacks: str) -> None:
    """What is missing may have been the best."""
    whole: Times = {"flash": 1.0, "cudnn": 0.5, "tokamax_flash": 2.0}
    part: Times = {"flash": 1.0, "tokamax_flash": 2.0}
    row = row_of(part, whole) if lacks == FORWARD else row_of(whole, part)
    found = judging.regret([row_of(whole, whole), row], judging.always("flash"))
    assert list(found.forward) == [2.0]


def test_where_one_kernel_was_measured_no_choice_is_judged() -> None:
    both: Times = {"flash": 1.0, "cudnn": 2.0}
    alone = row_of({"flash": 1.0}, both), row_of({"flash": 1.0}, {"flash": 1.0})
    found = judging.regret([row_of(both, both), *alone], judging.always("cudnn"))
    assert list(found.forward) == list(found.both) == [2.0]
    none = judging.regret(alone, judging.always("flash"))
    assert none.mean == 1.0 and none.line("flash") == "flash: no call was judged"


# ---- the command ---------------------------------------------------------------------------------


def test_the_table_names_the_files_of_each_device(tmp_path: Path, capsys) -> None:
    files = [
        written(tmp_path / "a.json", rows_on(H100, DRAWN), H100),
        written(tmp_path / "b.json", rows_on(H200, [*DRAWN, *SHAPES]), H200),
        written(tmp_path / "c.json", rows_on(H100, DRAWN[:2]), H100),
    ]
    table, before = tmp_path / "table.json", json.loads(TABLE.read_text())
    ran = run(capsys, "bench", "--fit", *files, "--write-table", str(table))
    found = json.loads(table.read_text())
    assert ran.status == 0 and found["NVIDIA H200"] == before["NVIDIA H200"]
    costs = found["NVIDIA H100"].pop("costs")
    assert costs["measured_on"] == {H100: [files[0], files[2]], H200: [files[1]]}
    assert costs["calls"] == 2 * len(DRAWN) + len(set(SHAPES))
    assert found["NVIDIA H100"] == before["NVIDIA H100"], "the shapes are those of the H200"


@pytest.mark.parametrize("taken", ["", "flash"])
def test_shapes_of_which_a_time_was_taken_back_are_not_whole(
    taken: str, tmp_path: Path, capsys
) -> None:
    rows, table = rows_on(H200, SHAPES), tmp_path / "table.json"
    rows[3].backward.pop(taken, None)
    files = [
        written(tmp_path / "a.json", rows, H200),
        written(tmp_path / "b.json", rows_on(H100, SHAPES), H100),
    ]
    assert run(capsys, "bench", "--fit", *files, "--write-table", str(table)).status == 0
    found, before = (json.loads(x.read_text())["NVIDIA H200"] for x in (table, TABLE))
    assert (found["entries"] == before["entries"]) == bool(taken)
    assert taken or found["measured_on"] == {H200: files[:1]}
    forward = found["entries"][0]["forward"]["flash"]
    assert taken or forward == pytest.approx(rows[0].forward["flash"], abs=1e-4)


@pytest.mark.parametrize(
    ("option", "other", "said"),
    [
        ("--fit", B200, f"of one family of devices, and these are of {B200} (blackwell), {H200}"),
        ("--against", H100, f"of one kind of device, and these are of {H100}, {H200} remedy name"),
    ],
)
def test_devices_that_are_unlike_are_refused(
    option: str, other: str, said: str, tmp_path: Path, capsys
) -> None:
    row = row_of({"flash": 1.0}, {"flash": 1.0})
    files = [written(tmp_path / f"{kind}.json", [row], kind) for kind in (H200, other)]
    ran = run(capsys, "bench", option, *files)
    assert ran.status == 1 and ran.out == ""
    assert said in " ".join(ran.err.split())


def test_times_of_too_few_calls_or_of_an_unclear_device_are_refused(tmp_path: Path, capsys) -> None:
    rows, grid = rows_on(H200, DRAWN), tmp_path / "grid.json"
    files = {kind: written(tmp_path / f"{kind}.json", rows, kind) for kind in (H200, H100, "")}
    one = written(grid, [*rows[:1], replace(rows[1], times={FORWARD: {}, BACKWARD: {}})], H200)
    fewer = run(capsys, "bench", "--fit", one)
    unclear = run(capsys, "bench", "--fit", *files.values())
    assert fewer.status == unclear.status == 1
    assert "and found times of fewer than two" in " ".join(fewer.err.split())
    assert "a file says on which its rows were measured" in " ".join(unclear.err.split())
    both = written(grid, rows[:1], H200), written(tmp_path / "other.json", rows[:1], H100)
    assert "fewer than two" in " ".join(run(capsys, "bench", "--fit", *both).err.split())
