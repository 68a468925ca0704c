"""A killed run goes on as if it had not been: the command itself, in processes of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from .runs import arrays, config, finish, start

STEPS = 30


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path):
    whole = config(tmp_path / "whole", steps=STEPS, checkpoint_every=STEPS)
    killed = config(tmp_path / "killed", steps=STEPS, checkpoint_every=3)
    process = start(killed)
    assert process.stdout is not None
    # A checkpoint is begun every third step, so the kill comes while one is being written or just
    # has been.
    reached = next(line for line in process.stdout if line.startswith("step 12/"))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, reached
    there = saved(tmp_path / "killed")
    assert 0 < max(there) < STEPS

    printed = finish(killed)
    assert f"going on from step {max(there)} of {STEPS}" in printed
    finish(whole)
    ours, theirs = arrays(tmp_path / "killed", STEPS), arrays(tmp_path / "whole", STEPS)
    assert ours.keys() == theirs.keys()
    assert any("average" in name for name in ours)
    assert any("optimizer" in name for name in ours)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def saved(folder: Path) -> list[int]:
    """List the whole checkpoints of a run."""
    return [
        int(path.name) for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdigit()
    ]


def losses(folder: Path) -> list[float]:
    facts = folder / "run" / "checkpoints" / str(STEPS) / "facts" / "metadata"
    return json.loads(facts.read_text())["losses"]
