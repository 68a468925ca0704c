"""A cache of tuned sizes for one test."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxattn import tuned


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A separate cache, and short timings."""
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    monkeypatch.setattr("maxattn.tools.tune.kernel_times.SECONDS", 0.01)
    monkeypatch.chdir(Path(__file__).parents[2])
    return tmp_path / "tuned.json"
