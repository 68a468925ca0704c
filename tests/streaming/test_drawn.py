"""Drawn streams, compared with a float64 model that keeps every key: tests/fuzz/streams.py."""

from __future__ import annotations

import pytest

from tests.fuzz.loop import draw
from tests.fuzz.run import describe, run
from tests.waiting import but

# Batch rows of different fill on a mesh; a prefix longer than the window, x64; recomputed frames of
# a window that dropped some, with a sink; positions by slots with a sink; a first frame alone.
QUICK = (0, 15, 24, 31, 35, 58)


@pytest.mark.parametrize("seed", but(range(60), QUICK))
def test_passes_are_those_of_a_video_that_keeps_every_key(seed: int) -> None:
    outcome = run(draw(f"streams:{seed}", describe()))
    assert outcome.kind == "right", f"{outcome.what}\n{outcome.snippet}"
