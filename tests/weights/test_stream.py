"""Files written tensor by tensor are those that safetensors itself reads."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from maxattn.errors import WeightsError
from maxattn.weights.saves import NAMES, Form, write


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

    write(
        tmp_path / "x.safetensors",
        {name: Form(x.shape, x.dtype) for name, x in tensors.items()},
        read,
    )
    assert sorted(held) == sorted(tensors)
    back = load_file(tmp_path / "x.safetensors")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        assert back[name].dtype == x.dtype and back[name].shape == x.shape
        assert back[name].tobytes() == x.tobytes()
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


def test_other_dtypes_are_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="complex64"):
        write(
            tmp_path / "x", {"a": Form((2,), np.complex64)}, lambda name: np.zeros(2, np.complex64)
        )
    assert not (tmp_path / "x").exists()


def test_a_tensor_that_is_not_what_the_header_says_stops_the_writing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="header"):
        write(tmp_path / "x", {"a": Form((2,), np.float32)}, lambda name: np.zeros(3, np.float32))
