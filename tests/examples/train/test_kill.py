"""Twenty kills at random moments, while steps run or a checkpoint is written: resumes are exact."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .made import losses
from .runs import arrays, config, finish, lines, start

KILLS, STEPS, EVERY = 20, 160, 2
# steps between the checkpoints of every fourth life: most kills then come between two of them
SELDOM = 10
AFTER = 9  # steps of a life, at most, before its kill is due
SAVING = 0.1  # seconds: the files of a checkpoint are being written so long, or longer


def saved(folder: Path) -> list[int]:
    """List the complete checkpoints of a run."""
    found = (folder / "run" / "checkpoints").iterdir()
    return [int(path.name) for path in found if path.name.isdigit()]


def unfinished(folder: Path, since: float = 0.0) -> int:
    """Count the checkpoints of a run that were started after a time and are incomplete."""
    count = 0
    for path in (folder / "run" / "checkpoints").glob("*"):
        with suppress(FileNotFoundError):  # finished between the listing and here, and so renamed
            count += not path.name.isdigit() and path.stat().st_ctime >= since
    return count


def live_and_die(path: Path, chance: random.Random, life: int) -> str:
    """Kill a run at a random moment after a random step, and return its output.

    Every second run is killed soon after the temporary folder of a checkpoint appears.
    """
    every = EVERY if life % 4 else SELDOM
    born, process = time.time(), start(path, f"training.checkpoint_every={every}")
    printed, left, last = "", chance.randint(1, AFTER), time.monotonic()
    for _, line in lines(process):
        printed += line
        if line.startswith("step "):
            left, spent, last = left - 1, time.monotonic() - last, time.monotonic()
            if not left:
                if life % 2:
                    while process.poll() is None and not unfinished(path.parent, born):
                        time.sleep(0.001)
                time.sleep(chance.uniform(0.0, SAVING if life % 2 else 2.0 * min(spent, 0.1)))
                break
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, f"life {life}: {printed}"
    return printed


@pytest.mark.slow
def test_every_resume_is_exact(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"random moments of seed {seed}")
    chance, folder = random.Random(seed), tmp_path / "killed"
    how = {"steps": STEPS, "checkpoint_every": EVERY}
    whole, killed = config(tmp_path / "whole", **how), config(folder, **how)
    finish(whole)
    right = losses(tmp_path / "whole" / "run", STEPS)
    reached, halves = [0], []
    for life in range(KILLS):
        born, said = time.time(), live_and_die(killed, chance, life)
        assert (f"going on from step {reached[-1]} of {STEPS}" in said) == bool(reached[-1]), said
        halves.append(unfinished(folder, born))
        reached.append(max(saved(folder), default=0))
        # The last one is what the next life loads; an older one may be half deleted.
        if reached[-1]:
            assert losses(folder / "run", reached[-1]) == right[: reached[-1]], life
    assert 0 < reached[-1] < STEPS
    assert KILLS // 4 <= sum(halves) < KILLS, "kills in the writing of a checkpoint, and others"
    assert f"going on from step {reached[-1]} of {STEPS}" in finish(killed)
    assert losses(folder / "run", STEPS) == right
    # The last arrays hang on every step before: one inexact resume, and they differ.
    ours, theirs = arrays(folder, STEPS), arrays(tmp_path / "whole", STEPS)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.tobytes() == theirs[name].tobytes(), name
    assert not unfinished(folder), "what was half-written is gone"
