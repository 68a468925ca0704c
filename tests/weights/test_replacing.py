"""Atomic writes: after kills, on full disks, without locks."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common import pictures
from maxattn_examples.common.pipeline_folder import write_json
from maxattn_examples.sample import inputs, torch_parts

import maxattn as ma
from maxattn.errors import InputError, MaxattnError
from maxattn.tools.writable import write_whole
from maxattn.weights import replacing as module
from tests.golden_text import check_golden

matplotlib.use("Agg")
ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from pathlib import Path
from importlib import util

# The file alone: its package would import jax, in half a second.
spec = util.spec_from_file_location("alone", "maxattn/weights/replacing.py")
alone = util.module_from_spec(spec)
spec.loader.exec_module(alone)
with alone.replacing(Path(sys.argv[1])) as beside:
    if sys.argv[2] == "folder":
        beside.mkdir()
    (beside / "one" if sys.argv[2] == "folder" else beside).write_text("half")
    print("half written", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def half_written(path: Path, kind: str) -> Iterator[subprocess.Popen]:
    """Run a process that writes half of a file or folder; kill it at the end."""
    command = [sys.executable, "-c", WRITE, str(path), kind]
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=ROOT, **pipe)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def write(path: Path, text: str) -> None:
    with module.replacing(path) as beside:
        assert beside.name == path.name
        beside.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_kill_left_goes_with_the_next_writer(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    with half_written(path, kind) as process:
        write(path, "second")  # while the first writer lives
        assert path.read_text() == "second" and len(names(tmp_path)) == 2
        process.kill()
        process.wait()
        write(other, "another")
        assert len(names(tmp_path)) == 3, "what is left of one file is another file's no more"
        write(path, "third")
    assert names(tmp_path) == ["a.txt", "b.txt"] and path.read_text() == "third"


def test_two_writers_both_end(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with half_written(path, "file") as process:
        write(path, "second")
        process.communicate("go\n")
        assert process.returncode == 0
    assert names(tmp_path) == ["a.txt"] and path.read_text() == "half"


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write(path, "first")
    with pytest.raises(FileNotFoundError, match="source"), module.replacing(path) as beside:
        beside.write_text("half")
        (tmp_path / "source").read_text()  # this error is the block's, and stays as it is
    assert names(tmp_path) == ["a.txt"] and path.read_text() == "first"
    with pytest.raises(InputError) as caught:
        write(tmp_path / "absent" / "a.txt", "first")
    check_golden("weights/file_not_written", str(caught.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("lacks", ["the system", "the file system"])
def test_without_locks_files_are_written_and_one_warning_says_so(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    module._warn_of_no_locks.cache_clear()
    if lacks == "the system":  # Windows has no fcntl
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        refused = OSError(errno.ENOLCK, "No locks available")
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(refused))
    left = tmp_path / "a.txt.1-abcdef01.partial"
    left.mkdir()  # whether its writer lives is not known
    for text in ("first", "second"):
        with module.locked(tmp_path):
            write(tmp_path / "a.txt", text)
    assert names(tmp_path) == ["a.txt", left.name]
    (said,) = caplog.messages
    assert "has no locks (flock)" in said and "*.partial" in said


@contextmanager
def full_disk() -> Iterator[None]:
    """Limit this process to files of 1,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), "u1")
LONG = "x" * 9000
CLIPS = NOISE[None, :, :, :1].repeat(64, -1) / 16.0
WRITERS: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: write_whole(path, LONG),
    "json": lambda path: write_json(path, {"x": LONG}),
    "safetensors": lambda path: inputs.write(path, {"x": np.zeros(9000, "f")}, ""),
    "png": lambda path: torch_parts.picture(NOISE, path),
    "gif": lambda path: pictures.moving(CLIPS, ["a"], path),
    "curve.png": lambda path: pictures.loss_curve([1.0, 0.5], path),
    "mask.png": lambda path: ma.masks.Causal().plot(path, 64, 64),
    "folder": lambda path: ma.weights.save_diffusers(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_full_disk_leaves_the_earlier_file_and_is_said_with_the_path(kind: str, tmp_path: Path):
    path, write = tmp_path / f"a.{kind}", WRITERS[kind]
    write(path)
    held = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with full_disk(), pytest.raises(MaxattnError) as caught:
        write(path)
    assert str(path) in str(caught.value) and "the system reports:" in str(caught.value)
    assert held == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
