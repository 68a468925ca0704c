"""The grid of drawn calls: what is drawn, timed, read and reported."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import drawn_calls
import grid
import numpy as np
import pytest
from drawn_calls import DrawnCall

from maxattn import masks as M
from maxattn.target import Target

DRAWN = drawn_calls.draw(3, 100)
SMALL = DrawnCall((1, 64, 64, 2, 2, 16))


def test_a_seed_draws_the_same_calls_of_every_kind() -> None:
    assert drawn_calls.draw(3, 100) == DRAWN != drawn_calls.draw(4, 100)
    assert set(Counter(call.kind for call in DRAWN)) == set(drawn_calls.MASKS)
    assert {call.sizes[5] for call in DRAWN} == set(drawn_calls.HEAD_DIMS)
    assert {call.dtype for call in DRAWN} == {"bf16", "f16"}
    assert any(call.sizes[3] != call.sizes[4] for call in DRAWN), "heads that share keys"
    ratios = [call.sizes[1] / call.sizes[2] for call in DRAWN]
    assert min(ratios) < 0.1 and max(ratios) > 10 and ratios.count(1.0) > 30


def test_what_is_drawn_is_a_moment_s_work_and_reads_back() -> None:
    for drawn in DRAWN:
        b, t, s, n, k, h = drawn.sizes
        assert 4 * drawn.pairs * h <= drawn_calls.MOST_WORK
        assert drawn.bytes <= drawn_calls.MOST_BYTES and b * n <= drawn_calls.MOST_ROWS
        assert drawn_calls.LEAST <= min(t, s) <= max(t, s) <= drawn_calls.MOST and n % k == 0
        call = drawn.call()
        assert (call.q_len, call.kv_len) == (t, s)
        assert call.mask.is_full == (drawn.kind == "full")
        assert DrawnCall.of_json(json.loads(json.dumps(drawn))) == drawn


def test_masks_are_those_they_are_called() -> None:
    window = DrawnCall((1, 8, 8, 1, 1, 8), kind="window", numbers=(2, 0)).mask()
    assert window == M.LocalWindow(2, 0).bind(8, 8)
    ids = DrawnCall((2, 5, 5, 1, 1, 8), kind="segments", numbers=(2, 3)).mask()
    assert np.array_equal(np.asarray(ids.q_ids)[1], [0, 0, 1, 1, 1])  # type: ignore[attr-defined]


@pytest.mark.slow
def test_workers_time_both_passes_of_every_kernel(tmp_path: Path) -> None:
    worker = grid.Worker()
    drawn = SMALL._replace(kind="segments", numbers=(30, 34))
    worker.load("0", json.loads(json.dumps(drawn)))
    row = worker.time("0", 0.01)
    assert row["forward"].keys() == row["backward"].keys() >= {"dot_product"}
    assert min(row["forward"].values()) > 0 and not row["refused"] and not worker.programs


def test_the_command_reports_files(tmp_path: Path, capsys, monkeypatch) -> None:
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    machine = {"device": "NVIDIA H200"}
    times = {"forward": {"flash": 2.0, "cudnn": 1.0}, "backward": {"flash": 3.0, "cudnn": 4.0}}
    first.write_text(grid.as_file(machine, [{"call": SMALL, **times}] * 2))
    again.write_text(grid.as_file(machine, [{"call": SMALL, "forward": {"flash": 0.5}}]))
    monkeypatch.setattr(sys, "argv", ["grid.py", "--against", str(first), str(again)])
    grid.main()
    said = capsys.readouterr().out
    assert "flash is the fastest in 2 of 2 passes" in said
    assert "auto: all time over that of the fastest 1.0000" in said


def test_a_time_of_null_takes_one_back(tmp_path: Path) -> None:
    path, machine = tmp_path / "rows.json", {"device": "NVIDIA H200"}
    both = {"flash": 2.0, "cudnn": 1.0}
    path.write_text(grid.as_file(machine, [{"call": SMALL, "forward": both, "backward": both}]))
    null = tmp_path / "null.json"
    null.write_text(grid.as_file(machine, [{"call": SMALL, "forward": {"flash": None}}]))
    (row,) = grid.read_files([path, null])
    assert row.forward == {"cudnn": 1.0} and row.backward == both
    assert not grid.judged([row])


@pytest.mark.parametrize(("taken", "over"), [(0.0129, 1.0), (0.0131, 1.31)])
def test_differences_up_to_three_microseconds_count_as_none(taken: float, over: float) -> None:
    assert grid._over(taken, 0.01) == pytest.approx(over)


def test_the_fastest_that_was_measured_is_what_auto_is_compared_with() -> None:
    target = Target("gpu", "NVIDIA H200", grid.PACKAGES)
    row = grid.Row(SMALL, target, {"flash": 2.0, "cudnn": 1.0}, {"flash": 4.0, "cudnn": 4.0})
    text = grid.report([row])
    assert grid.by_auto(row) == ("flash", "flash") and "fastest 1.2000" in text
