"""Files and tensors that do not fit raise one error with all mistakes, and change nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import maxattn as ma
from maxattn import weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden, check_refused
from tests.weights.models import equal, model_of, refused, values


def test_everything_that_does_not_fit_is_said_at_once_and_nothing_changes():
    model = model_of(0)
    state = weights.to_diffusers(model_of(5))
    del state["norm.bias"], state["stacked.1.attn1.to_q.weight"]
    state |= {
        "blocks.2.attn1.to_q.weight": np.zeros((16, 16)),
        "patch.weight": np.zeros((16, 3, 2, 2, 4), np.float32),
    }
    for read in (weights.check_diffusers, weights.load_diffusers):
        refused(model, partial(read, model, state), "does_not_fit")


@pytest.mark.parametrize("kind", ["rms_norm", "rms_norm_across_heads", None])
def test_a_remedy_for_shapes_is_followed(kind: str | None):
    """The remedy never is `strict=False`, which skips no wrong shape; for norms it is a setting."""

    def attention(size: int, norm: str | None) -> ma.FlaxAttention:
        return ma.FlaxAttention(size, 2, dim_head=8, qk_norm=norm, rngs=nnx.Rngs(0))

    other = {"rms_norm": "rms_norm_across_heads", "rms_norm_across_heads": "rms_norm", None: None}
    state = weights.to_diffusers(attention(16, kind))
    module = attention(16 if kind else 24, other[kind])
    for strict in (True, False):
        load = partial(weights.load_diffusers, module, state, strict=strict)
        refused(module, load, f"misshapen_{kind}")
    weights.load_diffusers(attention(16, kind), state)


def test_weights_are_checked_without_reading_a_number():
    """A model of shapes is enough, and stays one."""
    shapes, state = nnx.eval_shape(lambda: model_of(0)), weights.to_diffusers(model_of(5))
    assert weights.check_diffusers(shapes, state) == weights.Loaded()
    kept = jax.tree.leaves(nnx.state(shapes))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in kept)
    some = {name: x for name, x in state.items() if name != "norm.bias"}
    assert weights.check_diffusers(shapes, some, strict=False).missing == ("norm.bias",)
    behind = {f"a.{name}": x for name, x in state.items()}
    assert weights.check_diffusers(shapes, behind, prefix="a.") == weights.Loaded()
    integers = state | {"norm.bias": state["norm.bias"].astype(np.int8)}
    with pytest.raises(WeightsError, match="another dtype"):
        weights.check_diffusers(shapes, integers)


def test_a_prefix_is_suggested_and_taken():
    one, other = model_of(0), model_of(9)
    state = {f"model.transformer.{key}": value for key, value in weights.to_diffusers(one).items()}
    with pytest.raises(WeightsError, match=r"pass prefix='model\.transformer\.'"):
        weights.load_diffusers(other, state)
    weights.load_diffusers(other, state | {"vae.weight": np.zeros(3)}, prefix="model.transformer.")
    equal(one, other)


def test_not_strict_says_what_was_left(caplog: pytest.LogCaptureFixture):
    one, other = model_of(0), model_of(9)
    state = weights.to_diffusers(one)
    del state["norm.bias"], state["stacked.1.attn1.to_q.weight"]
    before = values(other)
    found = weights.load_diffusers(other, state | {"more": np.zeros(2)}, strict=False)
    assert found == weights.Loaded(("norm.bias", "stacked.1.attn1.to_q.weight"), ("more",))
    assert "missing: norm.bias" in caplog.text
    # A stacked parameter is filled whole or not at all.
    np.testing.assert_array_equal(
        values(other)["stacked.attn1.to_q.kernel"], before["stacked.attn1.to_q.kernel"]
    )
    np.testing.assert_array_equal(values(other)["norm.scale"], values(one)["norm.scale"])


def sharded(folder: Path) -> list[Path]:
    """Save a layer as two files with an index."""
    return list(weights.save_diffusers(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), folder, shard_bytes=20))


def half_a_file(files: list[Path]) -> None:
    files[0].write_bytes(files[0].read_bytes()[:-9])


def a_pickle(files: list[Path]) -> None:
    for file in files:
        file.unlink()
    (files[0].parent / "pytorch_model.bin").write_bytes(b"")


BROKEN: dict[str, Callable[[list[Path]], Any]] = {
    "a_missing_file": lambda files: files[0].unlink(),
    "half_a_file": half_a_file,
    "a_lost_tensor": lambda files: save_file({"other": np.zeros(2, np.float32)}, files[0]),
    "a_pickle": a_pickle,
    "nothing": lambda files: [file.unlink() for file in files],
    "two_models": lambda files: files[-1].unlink(),
    "index_not_json": lambda files: files[-1].write_text("{"),
    "index_without_map": lambda files: files[-1].write_text("{}"),
    "index_of_a_list": lambda files: files[-1].write_text("[1]"),
    "index_of_a_number": lambda files: files[-1].write_text('{"weight_map": {"weight": 1}}'),
    "index_map_of_a_list": lambda files: files[-1].write_text('{"weight_map": []}'),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_that_cannot_be_read(kind: str, tmp_path: Path):
    BROKEN[kind](sharded(tmp_path / "model"))
    with pytest.raises(WeightsError) as error:
        weights.load_diffusers(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), tmp_path / "model")
    text = str(error.value).replace(str(tmp_path), "FOLDER")
    check_golden(f"weights/{kind}", re.sub(r"\(.*\)", "(...)", text))  # safetensors' own words


LINEAR = {"weight": np.full((4, 4), 2, np.float32), "bias": np.full(4, 3, np.float32)}
NO_WEIGHTS: dict[str, tuple[Any, Any]] = {
    "none": ("layer", None),
    "lists": ("layer", {"weight": [[1.0] * 4] * 4, "bias": [0.0] * 4}),
    "numbered": ("layer", {0: LINEAR["weight"]}),
    "no_module": (None, LINEAR),
    "int8": ("layer", {k: v.astype(np.int8) for k, v in LINEAR.items()}),
    "bool": ("layer", {**LINEAR, "bias": np.ones(4, bool)}),
    "complex": ("layer", {**LINEAR, "bias": np.ones(4, np.complex64)}),
    "float8": ("layer", {**LINEAR, "bias": np.ones(4, ml_dtypes.float8_e4m3fn)}),
    "too_large": ("float16", {**LINEAR, "bias": np.array([1, -7e4, 2, np.inf], np.float32)}),
}


@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_what_is_no_weights_is_refused_and_nothing_changes(kind: str, tmp_path: Path):
    what, tensors = NO_WEIGHTS[kind]
    dtype = "float16" if what == "float16" else "float32"
    module: Any = what and nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(0))
    refused(module, lambda: weights.load_diffusers(module, tensors), f"no_weights_{kind}")
    if kind not in ("none", "lists", "numbered"):  # no file has these
        save_file(tensors, tmp_path / "x.safetensors")
        refused(module, lambda: weights.load_diffusers(module, tmp_path), f"no_weights_{kind}")


def test_weights_of_a_module_without_arrays_are_refused(tmp_path: Path):
    empty = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    check_refused("weights/no_arrays", WeightsError, lambda: weights.to_diffusers(empty))
    with pytest.raises(WeightsError):
        weights.save_diffusers(empty, tmp_path)
    assert not list(tmp_path.iterdir())
