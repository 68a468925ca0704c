"""A save into a folder with an earlier one: readers get the last complete save.

This is also true if a save is interrupted.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from maxattn import weights
from maxattn.errors import WeightsError
from maxattn.weights.saves import NAMES, Form, save_tensors, write
from tests.fuzz.loop import draw
from tests.fuzz.run import describe, run
from tests.golden_text import check_golden
from tests.waiting import but

SHARDS = {"single": 10**6, "two": 40, "four": 20}
NAME = "diffusion_pytorch_model"


class Killed(BaseException):
    """Simulates a kill: no code runs after it."""


def save(folder: Path, shards: str, value: int) -> set[str]:
    """Save four tensors of one value; return the names of the files."""
    forms = {name: Form((4,), np.dtype("float32")) for name in "abcd"}
    read = lambda _: np.full(4, value, np.float32)  # noqa: E731
    return {f.name for f in save_tensors(forms, read, folder, NAME, SHARDS[shards])}


def read_all(folder: Path) -> set[float]:
    """Return the distinct values of the four tensors: one if they are from one save."""
    tensors = weights.SafeTensors(folder)
    assert set(tensors) == set("abcd")
    return {float(x) for name in tensors for x in tensors[name][()]}


def test_an_index_that_cannot_be_read_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.safetensors.index.json").mkdir()
    with pytest.raises(WeightsError, match="it must be a writable folder") as caught:
        save(tmp_path, "two", 1)
    assert str(caught.value).startswith(f"folder: {tmp_path}")


@pytest.mark.parametrize(("before", "after"), [*product(SHARDS, SHARDS)])
def test_other_files_are_kept(before: str, after: str, tmp_path: Path) -> None:
    others = {"config.json", "other.safetensors.txt", f"{NAME}.fp16-00001-of-00002.safetensors"}
    others |= {f"{NAME}.bin.old"}
    tmp_path.joinpath("sub").mkdir()
    save(tmp_path, before, 1)
    for name in others:
        (tmp_path / name).write_text("kept")
    files = save(tmp_path, after, 2)
    assert {f.name for f in tmp_path.iterdir()} == files | others | {"sub"}
    (tmp_path / f"{NAME}.fp16-00001-of-00002.safetensors").unlink()
    assert read_all(tmp_path) == {2.0}


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make every change of the folder from the `step`-th on raise."""
    steps = count()

    def killing(change: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if next(steps) >= step:
                raise Killed
            return change(*args, **kwargs)

        return run

    changes = [(Path, name) for name in ("replace", "unlink", "write_text", "open")]
    for owner, name in (*changes, (os, "link")):
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))


@pytest.mark.parametrize(("before", "after"), [*product(SHARDS, SHARDS)])
def test_a_save_that_is_cut_off_leaves_one_whole_save(before: str, after: str, tmp_path: Path):
    """It is interrupted before any of its steps; the next save leaves nothing behind."""
    seen = []
    for step in count():
        folder = tmp_path / str(step)
        save(folder, before, 1)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, step)
            try:
                save(folder, after, 2)
            except Killed:
                done = False
            else:
                done = True
        seen.append(read_all(folder))
        for again in (3, 4):
            files = save(folder, before, again)
            assert read_all(folder) == {again}
            assert {f.name for f in folder.iterdir()} == files
        if done:
            break
    # Never some tensors of one save and some of the other.
    assert all(len(values) == 1 for values in seen)
    assert seen == sorted(seen, key=max) and seen[0] == {1.0} and seen[-1] == {2.0}


def test_twice_cut_off(tmp_path: Path) -> None:
    """The interrupted save replaces one whose index names files that are not renamed yet."""
    for first, second in product(range(20), range(0, 20, 4)):
        folder = tmp_path / f"{first}_{second}"
        save(folder, "two", 1)
        for value, step in ((2, first), (3, second)):
            with pytest.MonkeyPatch.context() as patch:
                kill_at(patch, step)
                with suppress(Killed):
                    save(folder, "two", value)
            assert len(read_all(folder)) == 1


def test_where_a_file_has_but_one_name_it_is_copied(tmp_path: Path, monkeypatch) -> None:
    def refused(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for value in (1, 2):
        files = save(tmp_path, "two", value)
        assert read_all(tmp_path) == {value} and {f.name for f in tmp_path.iterdir()} == files


def test_a_tensor_that_cannot_be_made_changes_nothing(tmp_path: Path) -> None:
    def fail(name: str) -> np.ndarray:
        if name == "d":
            raise RuntimeError("out of memory")
        return np.zeros(4, np.float32)

    files = save(tmp_path, "two", 1)
    forms = {name: Form((4,), np.dtype("float32")) for name in "abcd"}
    with pytest.raises(RuntimeError):
        save_tensors(forms, fail, tmp_path, NAME, 20)
    assert read_all(tmp_path) == {1.0} and {f.name for f in tmp_path.iterdir()} == files


PLACES = {
    "another index": lambda folder: folder,
    "a file": lambda folder: folder / "file",
    "no place": lambda folder: folder / "file" / "x",
    "no folder": lambda folder: None,
    "no module": lambda folder: folder,
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_save_that_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    layer: Any = None if kind == "no module" else nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(WeightsError) as error:
        weights.save_diffusers(layer, PLACES[kind](tmp_path))
    text = str(error.value).replace(str(tmp_path), "FOLDER")
    check_golden(f"weights/save_{kind.replace(' ', '_')}", text)


# ---- one file, written tensor by tensor ----------------------------------------------------------


def test_every_dtype_and_shape_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (7,), (), (0, 4), (2, 1, 3)]
    tensors = {}
    for i, name in enumerate(NAMES):
        dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for shape in shapes:
            tensors[f"{i}.{len(shape)}.{name}"] = (10 * rng.standard_normal(shape)).astype(dtype)
    held = []

    def read(name: str) -> np.ndarray:
        held.append(name)
        # As a transposed view, which is what a layout of another library is.
        return tensors[name].T.copy().T

    forms = {name: Form(x.shape, x.dtype) for name, x in tensors.items()}
    write(tmp_path / "x.safetensors", forms, read)
    assert sorted(held) == sorted(tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype and back[name].shape == x.shape
        assert back[name].tobytes() == x.tobytes()
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_other_tensors_than_the_header_s_stop_the_writing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="complex64"):
        write(tmp_path / "x", {"a": Form((2,), np.complex64)}, lambda _: np.zeros(2, np.complex64))
    assert not (tmp_path / "x").exists()
    with pytest.raises(AssertionError, match="header"):
        write(tmp_path / "x", {"a": Form((2,), np.float32)}, lambda _: np.zeros(3, np.float32))


# ---- two processes that save, and a third one that reads: tests/fuzz/writers.py ------------------

# Files of the same names, and a writer that is killed.
QUICK = (0,)


@pytest.mark.parametrize("seed", but(range(24), QUICK))
def test_every_read_is_one_save(seed: int) -> None:
    outcome = run(draw(f"writers:{seed}", describe()))
    assert outcome.kind == "right", f"{outcome.what}\n{outcome.snippet}"


def test_a_folder_without_a_save_is_refused(tmp_path: Path) -> None:
    left = tmp_path / "model.safetensors.1-abcdef01.partial"
    for half in (b"", b"half"):  # of a first save that goes on, or was killed
        with pytest.raises(WeightsError, match="it must be an existing"):
            weights.SafeTensors(tmp_path)
        left.write_bytes(half)
    forms = {"a": Form((64,), np.dtype("float32"))}
    files = save_tensors(forms, lambda _: np.zeros(64, "f"), tmp_path, "model", 256)
    assert {file.name for file in files} == {f.name for f in tmp_path.iterdir()}
