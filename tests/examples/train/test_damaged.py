"""Checkpoints that were cut or overwritten are read as they were, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from common.json_file import read_mapping
from train.checkpoint import Checkpoints
from train.task import Fixed

from maxattn.errors import ConfigError
from tests.golden_text import check_golden

STATE = {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(3)}
SETTINGS: Any = SimpleNamespace(resolved=lambda: {"model": {"dim": 8}})


def opened(folder: Path, **how: Any) -> Checkpoints:
    training: Any = SimpleNamespace(output_dir=str(folder), keep_checkpoints=2)
    return Checkpoints(SETTINGS, training, Fixed(("model",)), **how)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with opened(folder) as checkpoints:
        checkpoints.save(STATE, {"index": 1}, [1.0, 0.5], {})
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


DAMAGES = {
    "emptied": lambda whole: b"",
    "halved": lambda whole: whole[: len(whole) // 2],
    "other": lambda whole: b"\xff" * len(whole),
}


def test_a_checkpoint_that_is_damaged_anywhere_is_refused_or_read_as_it_was(made, tmp_path):
    """Each of its files is emptied, cut in half, and filled with other bytes."""
    seen = {"read": 0, "refused": 0}
    for file in files_of(made):
        for damage in (*DAMAGES, "removed"):
            folder = tmp_path / "run"
            shutil.copytree(made, folder)
            path, whole = folder / file, (folder / file).read_bytes()
            if damage == "removed":
                path.unlink()
            else:
                path.write_bytes(DAMAGES[damage](whole))
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


def test_a_damaged_checkpoint_is_refused_by_name(made, tmp_path):
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
