"""Checkpoints that were cut or overwritten are read intact, or refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from maxattn_examples.common.pipeline_folder import read_mapping
from maxattn_examples.train.checkpoint import Checkpoints
from maxattn_examples.train.task import Fixed

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
