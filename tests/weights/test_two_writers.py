"""Two processes save into one folder, and a third one reads it: each read is one whole save."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights.saves import Form, save_tensors
from tests.waiting import but

NAMES = "abcdef"
SAVE = """
import sys
import numpy as np
from maxattn.weights.saves import Form, save_tensors

folder, first, count, shards = sys.argv[1], *map(int, sys.argv[2:])
forms = {name: Form((64,), np.dtype("float32")) for name in "abcdef"}
print("ready", flush=True)
sys.stdin.readline()
for value in range(first, first + 2 * count, 2):
    save_tensors(forms, lambda _: np.full(64, value, "f"), folder, "model", 256 * shards)
    print(value, flush=True)
"""


@contextmanager
def writers(folder: Path, count: int, shards: tuple[int, int]) -> Iterator[list[subprocess.Popen]]:
    """Start two processes, one that saves even numbers and one that saves odd ones."""
    made = [
        subprocess.Popen(
            [sys.executable, "-c", SAVE, str(folder), str(2 + i), str(count), str(each)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for i, each in enumerate(shards)
    ]  # fmt: skip
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in made:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


def read(folder: Path) -> float:
    """Return the value of a folder's tensors, which are all of one save."""
    tensors = weights.SafeTensors(folder)
    assert set(tensors) == set(NAMES)
    (value,) = {float(x) for name in NAMES for x in tensors[name][()]}
    return value


def save_here(folder: Path, value: int, shards: int) -> set[str]:
    forms = {name: Form((64,), np.dtype("float32")) for name in NAMES}
    files = save_tensors(forms, lambda _: np.full(64, value, "f"), folder, "model", 256 * shards)
    return {file.name for file in files}


# How many tensors are in a file of each writer: one file, files of other names, and of the same.
SHARDS = ["6, 6", "6, 2", "2, 3", "2, 2"]


def tensors_of(text: str) -> tuple[int, int]:
    first, second = map(int, text.split(","))
    return first, second


@pytest.mark.parametrize("shards", but(SHARDS, ["6, 2"]))
@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_every_read_is_one_save(shards: str, count: int, tmp_path: Path) -> None:
    each = tensors_of(shards)
    save_here(tmp_path, 0, each[0])
    with writers(tmp_path, count, each) as both:
        values = {read(tmp_path)}
        while any(process.poll() is None for process in both):
            values.add(read(tmp_path))
        assert [process.returncode for process in both] == [0, 0]
    last = int(read(tmp_path))
    assert values <= set(map(float, range(2 * count + 2))) and last >= 2 * count
    assert {f.name for f in tmp_path.iterdir()} == save_here(tmp_path, 1, each[last % 2])


@pytest.mark.parametrize("shards", but(SHARDS, ["2, 2"]))
@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_a_whole_save(shards: str, kills: int, tmp_path: Path) -> None:
    each = tensors_of(shards)
    drawn = random.Random(0)
    save_here(tmp_path, 0, each[0])
    for _ in range(kills):
        with writers(tmp_path, 10_000, each) as both:
            for process in both:
                for _ in range(drawn.randrange(1, 6)):
                    assert process.stdout is not None
                    process.stdout.readline()
                    read(tmp_path)
                process.send_signal(signal.SIGKILL)
                process.wait()
                read(tmp_path)
    assert save_here(tmp_path, 1, each[1]) == {f.name for f in tmp_path.iterdir()}
    assert read(tmp_path) == 1


def test_a_folder_without_a_save_is_refused(tmp_path: Path) -> None:
    left = tmp_path / "model.safetensors.1-abcdef01.partial"
    for half in (b"", b"half"):  # of a first save that goes on, or was killed
        with pytest.raises(WeightsError, match="it must be an existing"):
            read(tmp_path)
        left.write_bytes(half)
    assert save_here(tmp_path, 1, 6) == {f.name for f in tmp_path.iterdir()}
