"""The forty model calls: each can be made, and a run compares two checkouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import model_calls
import numpy as np
import pytest
from forty_calls import ModelCall
from model_calls import BOTH, FORWARD, Row

from maxattn import masks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "model_calls.py"
PLAIN = ModelCall("plain", (1, 64, 64, 2, 16))
SLOW = PLAIN._replace(name="slow")
CROSS = ModelCall("cross", (1, 64, 8, 2, 16), role="cross", share=0.01)


@pytest.mark.parametrize("tiny", [False, True])
def test_every_mask_fits_its_call(tiny):
    calls = model_calls.model_calls(tiny)
    assert len({call.name for call in calls}) == 40
    for call in calls:
        b, t, s, n = call.shape[:4]
        if call.mask:
            call.mask(masks).bind(t, s, b, n)
        assert not call.bias or call.bias == (b, n, t, s)


@pytest.mark.slow
def test_two_checkouts_are_timed_in_turns(tmp_path):
    rows = tmp_path / "rows.json"
    only = ["--only", "sdxl-64-cross,qwen-image", "--kernel", "dot_product", "--tiny"]
    few = ["--rounds", "2", "--seconds", "0.001", "--workers", "1", "--json", str(rows)]
    words = [sys.executable, str(SCRIPT), "--old", str(ROOT), *only, *few]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "gate: " in done.stdout, done.stderr
    read = json.loads(rows.read_text())
    assert read["about"]["old"]["tree"] == read["about"]["new"]["tree"] == str(ROOT)
    for row in read["rows"]:
        assert not row["failed"] and row["error"] == 0
        assert all(len(row["rounds"][what]) >= 2 for what in (FORWARD, BOTH))


def test_a_name_that_is_not_known_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--old", str(ROOT), "--only", "sdxl-65"])
    with pytest.raises(SystemExit, match="2"):
        model_calls.main()
    assert "no call is named sdxl-65" in capsys.readouterr().err


def row(call, forward, both=1.0, error=0.0):
    return Row(call, {FORWARD: [(1.0, forward)] * 2, BOTH: [(1.0, both)] * 2}, error)


@pytest.mark.parametrize(
    "rows, why",
    [
        ([row(PLAIN, 1.005), row(CROSS, 1.0)], ""),
        ([row(PLAIN, 1.029), row(PLAIN, 0.98)], ""),
        ([row(PLAIN, 1.02)], "geomean above 1.01"),
        ([row(PLAIN, 0.9), row(SLOW, 0.9, 1.04)], "slow: forward + backward"),
        ([row(CROSS, 1.4), row(PLAIN, 0.7)], ""),  # 0.4% of a step
        ([row(CROSS, 1.6), row(PLAIN, 0.6)], "cross: forward"),
        ([row(PLAIN, 1.0, error=1.5)], "results differ"),
        ([row(PLAIN, 1.0), Row(CROSS, {}, failed="new: no memory")], "cross failed"),
    ],
)
def test_the_gate(rows, why):
    lines, passes = model_calls.verdict(rows)
    assert passes == (not why) and why in lines[-1]


@pytest.mark.parametrize("change, agrees", [(1e-3, True), (0.5, False), (np.nan, False)])
def test_results_are_compared_in_pieces_of_64_tokens(tmp_path, change, agrees):
    x = np.random.default_rng(0).normal(size=(2, 6400, 3)).astype(np.float32)
    y = x.copy()
    y[1, 640:704] += change
    for name, array in (("old", x), ("new", y)):
        np.savez(tmp_path / f"{name}.npz", array)
    error = model_calls._error(tmp_path / "old.npz", tmp_path / "new.npz")
    assert (error <= 1) == agrees
