"""Short calls behind passes over memory, by the host's clock: what the passes hide has no time."""

from __future__ import annotations

from math import isnan
from typing import Any

import pytest

from maxattn.tools.bench.grid import behind
from maxattn.tools.bench.grid.behind import Behind


def test_a_call_that_the_passes_hide_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 10 to 12 ms tell nothing of a call of 1 ms, and much of one of 30."""
    alone, programs = iter([10e-3, 11e-3, 12e-3]), iter([12e-3, 41e-3] * 3)

    def queue(run: Any, *_: Any) -> float:
        return next(alone if run is behind.PASSES else programs)

    monkeypatch.setattr(behind, "queue", queue)
    monkeypatch.setattr(behind, "_passes", lambda: (None, behind.PASSES))
    monkeypatch.setattr(behind, "in_order", lambda _, listed: listed)
    jobs = [(Behind(None, name), [()]) for name in ("short", "long")]
    found = behind._by_host(jobs, 3)
    assert all(isnan(x) for x in found["short"])
    assert found["long"] == pytest.approx([30e-3] * 3)
