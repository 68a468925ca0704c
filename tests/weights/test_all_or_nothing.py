"""A load changes nothing if any part of it fails, and reads only the named files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from maxattn import weights
from maxattn.errors import WeightsError
from tests.golden_text import check_golden, check_refused
from tests.weights import models
from tests.within import within


class Model(nnx.Module):
    """Three layers, the last two stacked."""

    diffusers_stacked = ("stacked",)

    def __init__(self, dtype: Any) -> None:
        self.a = nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.stacked = nnx.vmap(
            lambda key: nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(key))
        )(jax.random.split(jax.random.key(7), 2))


def fresh(dtype: Any = jnp.float32) -> Model:
    return models.fresh(Model, dtype)


def numbers(value: float = 9) -> dict[str, np.ndarray]:
    names = weights.to_diffusers(fresh())
    return {name: np.full(x.shape, value, np.float32) for name, x in names.items()}


def held_by(model: nnx.Module) -> set[float]:
    """List the values of all parameters."""
    return {float(x) for array in weights.to_diffusers(model).values() for x in array.flat}


def refused(tensors: Any, model: nnx.Module | None = None, **more: Any) -> WeightsError:
    """Fail unless a load raises and has changed nothing."""
    model = model or fresh()
    return models.refused(model, lambda: weights.load_diffusers(model, tensors, **more))


# ---- arrays that cannot be read ------------------------------------------------------------------


class Closed:
    """An array of a library whose file is closed."""

    shape, dtype = (4,), np.dtype("float32")

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("the file is closed")


def donated() -> jax.Array:
    x = jnp.ones(4)
    x.delete()
    return x


class NoShape:
    shape, dtype = None, np.dtype("float32")


UNREADABLE: dict[str, Callable[[], Any]] = {
    "donated": donated,
    "a_shape_alone": lambda: jax.ShapeDtypeStruct((4,), jnp.float32),
    "of_a_closed_file": Closed,
    "without_a_shape": NoShape,
    "a_number": lambda: 3.0,
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_array_that_cannot_be_read_changes_nothing(kind):
    for name in ("stacked.1.bias", "a.weight", "a.bias"):
        error = refused(numbers() | {name: UNREADABLE[kind]()})
        assert name in str(error)
    check_golden(f"weights/unreadable_{kind}", str(error))


def lora_numbers() -> dict[str, Any]:
    return {
        f"{layer}.{part}.weight": np.ones((2, 4) if part == "lora_A" else (4, 2), np.float32)
        for layer in ("a", "stacked.0", "stacked.1")
        for part in ("lora_A", "lora_B")
    }


class Failing(Mapping[str, Any]):
    """Tensors of which only so many can be read."""

    def __init__(self, tensors: dict[str, Any], reads: int) -> None:
        self.tensors, self.left = tensors, reads

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, name: str) -> Any:
        return _FailingTensor(self, self.tensors[name])


class _FailingTensor:
    def __init__(self, owner: Failing, tensor: np.ndarray) -> None:
        self.owner, self.tensor = owner, tensor
        self.shape, self.dtype = tensor.shape, tensor.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        self.owner.left -= 1
        if self.owner.left < 0:
            raise OSError(5, "the disk is gone")
        return self.tensor[index]


@pytest.mark.parametrize("load", ["merge_lora", "load_diffusers"])
def test_what_becomes_unreadable_midway_changes_nothing(load):
    """Any one of the reads fails; if all succeed, the model is loaded."""
    tensors = lora_numbers() if load == "merge_lora" else numbers()
    for reads in range(len(tensors)):
        model = fresh()
        call = lambda: getattr(weights, load)(model, Failing(tensors, reads))  # noqa: B023, E731
        assert "the disk is gone" in str(models.refused(model, call))
    getattr(weights, load)(fresh(), Failing(tensors, len(tensors)))


@pytest.mark.parametrize("change", ["cut", "written", "replaced", "removed"])
def test_a_file_that_changes_while_it_is_open(change, tmp_path):
    """An overwritten file is refused; a replaced or removed one can still be read."""
    path, model = tmp_path / "x.safetensors", fresh()
    save_file(numbers(), path)
    held = weights.SafeTensors(path)
    if change in ("cut", "written"):
        os.truncate(path, 16) if change == "cut" else path.write_bytes(b"x" * path.stat().st_size)
        os.utime(path, (1, 1))
        check_golden("weights/file_changed", str(refused(held)).replace(str(tmp_path), "FOLDER"))
        return
    path.unlink()
    if change == "replaced":
        save_file(numbers(7), path)
    weights.load_diffusers(model, held)
    assert held_by(model) == {9}


def test_arguments_that_are_none_are_refused(tmp_path):
    assert refused(numbers(), prefix=None).setting == "prefix"
    assert refused(numbers(), mesh={"data": 1}).setting == "mesh"
    for size in (0, -1, "5GB", True, 2.5, None, 10**30):
        with pytest.raises(WeightsError) as error:
            weights.save_diffusers(fresh(), tmp_path / "x", shard_bytes=size)  # type: ignore[arg-type]
        assert error.value.setting == "shard_bytes"
    assert not list(tmp_path.iterdir())
    for path in ("a\0b", "x" * 300, tmp_path / ("y" * 300) / "z", "\ud800"):
        refused(path)
        with pytest.raises(WeightsError):
            weights.save_diffusers(fresh(), path)
    with pytest.raises(WeightsError):
        weights.to_diffusers(fresh(), prefix=3)  # type: ignore[arg-type]


# ---- parameters of numpy, and deleted ones -------------------------------------------------------


def on_host(dtype: Any = jnp.float32) -> Model:
    """A model with numpy parameters, as in a restored checkpoint."""
    model = fresh(dtype)
    nnx.update(model, jax.tree.map(np.asarray, nnx.state(model)))
    assert isinstance(model.a.kernel.get_value(), np.ndarray)
    return model


def test_numpy_parameters_are_read_saved_loaded_and_merged(tmp_path):
    model, want = on_host(jnp.bfloat16), weights.to_diffusers(fresh(jnp.bfloat16))
    weights.save_diffusers(model, tmp_path)
    saved = {name: tensor[()] for name, tensor in weights.SafeTensors(tmp_path).items()}
    for found in (weights.to_diffusers(model), saved):
        for name, x in want.items():
            np.testing.assert_array_equal(found[name], x)
    weights.load_diffusers(model, numbers(3))
    assert held_by(model) == {3.0}
    one, other = on_host(), fresh()
    for each in (one, other):
        weights.merge_lora(each, lora_numbers(), 0.5)
    models.equal(one, other)


def test_deleted_parameters_are_refused(tmp_path):
    model = Model(jnp.float32)
    model.a.kernel.get_value().delete()
    check_refused("weights/deleted_parameter", WeightsError, lambda: weights.to_diffusers(model))
    with pytest.raises(WeightsError):
        weights.save_diffusers(model, tmp_path)
    with pytest.raises(WeightsError):
        weights.merge_lora(model, lora_numbers())


# ---- numbers beyond a dtype ----------------------------------------------------------------------

F32, F64, BF16, F16 = np.float32, np.float64, ml_dtypes.bfloat16, np.float16
# The largest number that rounds to a finite one, and the first that does not.
EDGES = [
    (F32, BF16, *(float(np.uint32(bits).view(F32)) for bits in (0x7F7F7FFF, 0x7F7F8000))),
    (F32, F16, 65519.996, 65520.0),
    (F64, F16, 65519.99999999, 65520.0),
    (F64, F32, 3.4028235677973362e38, 3.4028235677973366e38),
    (BF16, F16, 65280.0, 65536.0),
]


@pytest.mark.parametrize(("theirs", "ours", "last", "beyond"), EDGES, ids=str)
def test_a_number_is_refused_where_it_rounds_to_infinity(theirs, ours, last, beyond):
    state: dict[str, Any] = {name: x.astype(theirs) for name, x in numbers(1).items()}
    for sign, others in ((1, []), (-1, [np.inf, -np.inf, np.nan])):
        state["stacked.1.bias"] = np.array([*others, *[0] * (3 - len(others)), sign * last], theirs)
        model = fresh(ours)
        weights.load_diffusers(model, state)
        bias = weights.to_diffusers(model)["stacked.1.bias"]
        assert np.isfinite(bias[3]) and np.isinf(bias).sum() == 2 * bool(others)
        state["stacked.1.bias"][3] = sign * beyond
        error = refused(state, fresh(ours))
        assert error.value == "stacked.1.bias" and "whose largest" in error.rule


# ---- an index ------------------------------------------------------------------------------------


def indexed(folder: Path, files: dict[str, str] | str) -> Path:
    """Write an index; the files it should name are in its folder, and one is outside."""
    (folder / "model" / "sub").mkdir(parents=True, exist_ok=True)
    for path in ("model/x.safetensors", "model/sub/x.safetensors", "x.safetensors"):
        save_file(numbers(), folder / path)
    text = files if isinstance(files, str) else json.dumps({"weight_map": files})
    (folder / "model" / "m.safetensors.index.json").write_text(text)
    return folder / "model" / "m.safetensors.index.json"


OUTSIDE = [
    "sub/../../x.safetensors", "/etc/passwd", "..", "", ".", "a/../../x", "..\\x.safetensors",
    "C:\\x.safetensors", "C:x.safetensors", "\\host\\x", "../x.safetensors",
]  # fmt: skip


def test_an_index_names_no_file_outside_of_its_folder(tmp_path):
    for name in OUTSIDE:
        path = indexed(tmp_path, dict.fromkeys(numbers(), name))
        error = refused(path.parent)
        assert str(refused(path)) == str(error) and "outside of it" in error.rule, name
    check_golden("weights/index_outside", str(error).replace(str(tmp_path), "FOLDER"))


def test_an_index_names_files_of_its_folder_and_below(tmp_path):
    for name in (str(Path("sub", "x.safetensors")), "x.safetensors", "./x.safetensors"):
        model = fresh()
        weights.load_diffusers(model, indexed(tmp_path, dict.fromkeys(numbers(), name)))
        assert held_by(model) == {9}


NO_INDEX = {
    "twice": '{"weight_map": {"a.bias": "x.safetensors", "a.bias": "sub/x.safetensors"}}',
    "deep": "[" * 5000,
    "deep_inside": '{"weight_map": ' + "[" * 900 + "]" * 900 + "}",
    "digits": '{"weight_map": ' + "9" * 5000 + "}",
    "no_text": b"\xff".decode("latin1"),
    "long_name": json.dumps({"weight_map": {"a.bias": "x" * 300}}),
    "nul": json.dumps({"weight_map": {"a.bias": "a\0b"}}),
    "long_tensor": json.dumps({"weight_map": {"x" * 100_000: "x.safetensors"}}),
}


@pytest.mark.parametrize("kind", NO_INDEX)
def test_an_index_of_any_kind_is_refused(kind, tmp_path):
    with within():
        error = refused(indexed(tmp_path, NO_INDEX[kind]))
    assert len(str(error)) < 2000
    if kind == "deep" and sys.version_info >= (3, 13):  # which reads deeper than this file goes
        assert "incomplete" in str(error)
    elif kind != "long_name":  # which is cut where the test's folder ends
        check_golden(f"weights/index_{kind}", str(error).replace(str(tmp_path), "FOLDER"))
