"""Folders of random weights load and save back bit for bit; the real size in bounded host memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import folder
import numpy as np
import pytest
from wan21.sizes import Sizes

from maxattn import weights
from tests.fixtures import make_diffusers as made

from .conftest import ROOT


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder, "SIZES", {"small": Sizes(**made.MODEL)})
    files = folder.make(tmp_path / "made", "small", "bfloat16", 4000)
    assert len(files) > 3
    return tmp_path / "made" / "transformer"


def test_a_made_folder_saves_back_bit_for_bit(small: Path, tmp_path: Path) -> None:
    seen = folder.check(small, tmp_path / "again", "bfloat16", 6000)
    assert seen["different"] == [] and seen["tensors"] == len(weights.SafeTensors(small))


def test_one_flipped_bit_is_found(small: Path, tmp_path: Path) -> None:
    folder.check(small, tmp_path / "again", "bfloat16", 2**30)
    path = tmp_path / "again" / "diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert len(folder.different(small, tmp_path / "again")) == 1


def test_random_tensors_have_their_own_seeds() -> None:
    form = folder.Form((64,), np.dtype("float32"))
    one, other, scale = (folder.random(name, form) for name in ("a.weight", "b.weight", "norm_q.weight"))
    assert (one != other).all() and abs(scale.mean() - 1) < 0.1
    np.testing.assert_array_equal(one, folder.random("a.weight", form))


@pytest.mark.slow
def test_wan_1_3b_loads_and_saves_with_one_parameter_more_than_the_model_in_memory(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "folder.py")]
    size = ["--dtype", "bfloat16", "--shard-gib", "1"]
    subprocess.run([*command, "make", str(tmp_path / "made"), *size], check=True, timeout=900)
    where = [str(tmp_path / "made" / "transformer"), "--save", str(tmp_path / "again")]
    done = subprocess.run([*command, "check", *where, *size], check=True, timeout=900, capture_output=True, text=True)
    seen = json.loads(done.stdout)
    print(seen)
    assert seen["different"] == [] and seen["tensors"] == 825 and seen["files"] > 3
    # On a CPU the model itself is in the host's memory; beside it at most one parameter, of all layers stacked.
    assert seen["load_peak"] < seen["bytes"] + 1.2 * seen["largest"]
    assert seen["save_peak"] < 0.5 * seen["largest"]
