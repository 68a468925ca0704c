"""Checkpoints and folders that were cut or written over: read as they were, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from common.json_file import read_mapping
from safetensors.numpy import save_file
from train.checkpoint import Checkpoints
from train.latents import EMPTY, LatentFolder
from train.task import Fixed

from maxattn.errors import ConfigError
from tests.golden_text import check_golden

STATE = {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(3)}
SETTINGS: Any = SimpleNamespace(resolved=lambda: {"model": {"dim": 8}})


def opened(folder: Path) -> Checkpoints:
    training: Any = SimpleNamespace(output_dir=str(folder), keep_checkpoints=2)
    return Checkpoints(SETTINGS, training, Fixed(("model",)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with opened(folder) as checkpoints:
        checkpoints.save(STATE, {"index": 1}, [1.0, 0.5], {})
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def test_a_checkpoint_that_is_damaged_anywhere_is_refused_or_read_as_it_was(made, tmp_path):
    """Each of its files is emptied, cut in half, and filled with other bytes."""
    seen = {"read": 0, "refused": 0}
    for file in files_of(made):
        for damage in ("emptied", "halved", "other", "removed"):
            folder = tmp_path / "run"
            shutil.copytree(made, folder)
            _damage(folder / file, damage)
            try:
                with opened(folder) as checkpoints:
                    if checkpoints.step:
                        np.testing.assert_array_equal(checkpoints.load(STATE)["w"], STATE["w"])
                        assert checkpoints.losses == [1.0, 0.5]
                seen["read"] += 1
            except ConfigError as error:
                assert error.remedy
                seen["refused"] += 1
            shutil.rmtree(folder)
    assert seen["refused"] >= 4 and seen["read"] >= 4, seen


def _damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        cut = len(whole) // 2
        texts = {"emptied": b"", "halved": whole[:cut], "other": b"\xff" * len(whole)}
        path.write_bytes(texts[how])


def test_a_damaged_checkpoint_is_said(made, tmp_path):
    shutil.copytree(made, tmp_path / "run")
    facts = tmp_path / "run" / "checkpoints" / "2" / "facts" / "metadata"
    facts.write_text("[]")
    with pytest.raises(ConfigError) as error:
        opened(tmp_path / "run")
    check_golden("training/damaged_checkpoint", str(error.value).replace(str(tmp_path), "FOLDER"))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"[" * 5000, b"\xff", b"9" * 5000])
def test_settings_of_a_folder_that_are_damaged_are_refused(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError):
        read_mapping(path)


ONE = np.ones((), np.float32)
ROWS = np.ones((2, 3, 4, 4), np.float32)
WRONG: dict[str, dict[str, np.ndarray]] = {
    "a_number": {"latents": ONE},
    "a_text_that_is_a_number": {"latents": ROWS, "text": ONE},
    "nothing": {},
    "other_rows": {"latents": ROWS, "text": ROWS[:1]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_latents_without_rows_are_refused(kind, tmp_path):
    save_file(WRONG[kind], tmp_path / "latents-00000.safetensors", {"scaled": "true"})
    with pytest.raises(ConfigError):
        LatentFolder(str(tmp_path))


@pytest.mark.parametrize("empty", [ONE, np.ones((0, 5), np.float32), np.ones((2, 5), np.float32)])
def test_an_empty_text_of_another_form_is_refused(empty, tmp_path):
    arrays = {"latents": ROWS, "text": np.ones((2, 5), np.float32)}
    save_file(arrays, tmp_path / "latents-00000.safetensors", {"scaled": "true"})
    save_file({"negative_text": empty}, tmp_path / EMPTY)
    with pytest.raises(ConfigError):
        _ = LatentFolder(str(tmp_path)).empty
