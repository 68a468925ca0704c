"""Twenty kills at random moments, in training and while a checkpoint is being written: every resume is exact."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from .runs import arrays, config, finish, start
from .test_resume import saved

KILLS, STEPS, EVERY = 20, 80, 2


def losses_at(folder: Path, step: int) -> list[float]:
    """Read the losses up to a checkpoint."""
    return json.loads((folder / "run" / "checkpoints" / str(step) / "facts" / "metadata").read_text())["losses"]


def live_and_die(path: Path, chance: random.Random, life: int) -> str:
    """Run until some steps are done, wait up to the time of two more, kill; return what was printed."""
    process = start(path, f"training.steps={STEPS}")
    assert process.stdout is not None
    printed, left, last = [], chance.randint(1, 5), time.monotonic()
    for line in process.stdout:
        printed.append(line)
        if line.startswith("step "):
            left, spent, last = left - 1, time.monotonic() - last, time.monotonic()
            if not left:
                time.sleep(chance.uniform(0.0, 2.0 * min(spent, 0.5)))
                break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"life {life}: {''.join(printed)}"
    return "".join(printed)


@pytest.mark.slow
def test_every_resume_is_exact(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"random moments of seed {seed}")
    chance = random.Random(seed)
    how = {"steps": STEPS, "checkpoint_every": EVERY}
    whole, killed = config(tmp_path / "whole", **how), config(tmp_path / "killed", **how)
    finish(whole)
    right = losses_at(tmp_path / "whole", STEPS)
    half, reached = 0, []
    for life in range(KILLS):
        before = max(saved(tmp_path / "killed"), default=0) if life else 0
        said = live_and_die(killed, chance, life)
        assert (f"going on from step {before} of {STEPS}" in said) == bool(before), said
        folder = tmp_path / "killed" / "run" / "checkpoints"
        half += sum(not path.name.isdigit() for path in folder.iterdir())
        reached.append(max(saved(tmp_path / "killed"), default=0))
        print(f"life {life}: last whole checkpoint {reached[-1]}", flush=True)
        if reached[-1]:
            assert losses_at(tmp_path / "killed", reached[-1]) == right[: reached[-1]], life
    assert 0 < reached[-1] < STEPS
    finish(killed)
    assert losses_at(tmp_path / "killed", STEPS) == right
    # The last arrays hang on every step before: one inexact resume, and they differ.
    ours, theirs = arrays(tmp_path / "killed", STEPS), arrays(tmp_path / "whole", STEPS)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.tobytes() == theirs[name].tobytes(), name
    print(f"{KILLS} kills, last whole checkpoints {reached}, {half} half-written ones found and never loaded")
