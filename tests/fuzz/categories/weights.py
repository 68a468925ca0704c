"""Weights in safetensors: loaded as they stand, or refused with nothing changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.case import Case, Machine, Names, Wrong
from tests.fuzz.mutate import mutated_text
from tests.fuzz.safetensors_bytes import mutated, pack, unpack

SOURCE = """\
import pathlib, tempfile
from flax import nnx
class Model(nnx.Module):
    def __init__(self):
        self.to_q = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype={dtype!r})
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
model = Model()
{host}folder = pathlib.Path(tempfile.mkdtemp()) / 'in'
folder.mkdir()
for name, data in {files!r}.items():
    path = (folder / name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
numbers = lambda: {{k: np.asarray(v) for k, v in ma.weights.to_diffusers(model).items()}}
before = numbers()
loaded = ma.weights.load_diffusers(model, folder{file}, strict={strict})
"""
SHAPES = {"to_q.weight": (2, 3), "to_q.bias": (2,), "norm.weight": (2,), "norm.bias": (2,)}


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw one file, or two and their index, whole or mutated."""
    tensors = _tensors(rng)
    files = _indexed(rng, tensors) if rng.random() < 0.35 else {"m.safetensors": _one(rng, tensors)}
    file = rng.choice(["", "", " / 'm.safetensors'"])
    strict, dtype = rng.random() < 0.7, rng.choice(["float32", "float32", "bfloat16", "float16"])
    host = "nnx.update(model, jax.device_get(nnx.state(model)))\n" if rng.random() < 0.05 else ""
    source = SOURCE.format(files=files, file=file, strict=strict, dtype=dtype, host=host)
    facts = {"files": sorted(files), "dtype": dtype}
    check = _check_of(files)
    return Case("weights", seed, source, check, unchanged, facts, seconds=10)


def _tensors(rng: Random) -> dict[str, np.ndarray]:
    """Draw the tensors of the model, in few draws with another shape, dtype or odd numbers."""
    numbers = np.random.default_rng(rng.randrange(10**6))
    dtype = rng.choice(["<f4", "<f4", "<f2", "<f8"])
    tensors = {name: numbers.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    name = rng.choice(list(SHAPES))
    odd = rng.random()
    if odd < 0.1:
        tensors[name].flat[0] = rng.choice([np.nan, np.inf, 6e4, 3.4e38 if dtype != "<f2" else 1.0])
    elif odd < 0.15:
        tensors[name] = tensors[name].astype(rng.choice(["<i4", "|u1", "<i8"]))
    elif odd < 0.2:
        tensors[name] = tensors[name].reshape(rng.choice([(-1,), (1, -1), (-1, 1)]))
    return tensors


def _one(rng: Random, tensors: dict[str, np.ndarray]) -> bytes:
    return pack(tensors) if rng.random() < 0.3 else mutated(rng, tensors)


def _indexed(rng: Random, tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Spread the tensors over two files, and mutate their index or one of them."""
    names = list(tensors)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    where: dict[str, Any] = {name: file for file, held in parts.items() for name in held}
    other = rng.choice(
        [
            "../x.safetensors",
            "/etc/passwd",
            "c.safetensors",
            "",
            "a" * 300,
            5,
            None,
            "b.safetensors",
            "m.pt",
        ]
    )
    if rng.random() < 0.4:
        where[rng.choice([*names, "more"])] = other
    index = json.dumps({"metadata": {}, "weight_map": where})
    index = mutated_text(rng, index) if rng.random() < 0.3 else index
    index = "[" * 5000 if rng.random() < 0.03 else index
    files = {file: pack({n: tensors[n] for n in held}) for file, held in parts.items()}
    if rng.random() < 0.3:
        files["a.safetensors"] = mutated(rng, {n: tensors[n] for n in names[:2]})
    outside = {"../x.safetensors": pack(tensors)} if other == "../x.safetensors" else {}
    return files | outside | {"m.safetensors.index.json": index.encode("utf-8", "replace")}


def unchanged(names: Names) -> None:
    """Hold that a refusal left every parameter as it was."""
    after = names["numbers"]()
    for name, value in names["before"].items():
        if value.tobytes() != after[name].tobytes():
            raise Wrong(
                f"refused, and {name} is changed", f"print(before[{name!r}], numbers()[{name!r}])"
            )


def _check_of(files: dict[str, bytes]) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        held = _held(files)
        after, missing = names["numbers"](), names["loaded"].missing
        for name, value in after.items():
            want = names["before"][name] if name in missing else held.get(name)
            _same(name, value, want)

    return check


def _held(files: dict[str, bytes]) -> dict[str, np.ndarray]:
    """Read what the files inside of the folder hold."""
    held: dict[str, np.ndarray] = {}
    for file, data in files.items():
        if file.endswith(".safetensors") and not file.startswith(".."):
            try:
                held |= unpack(data)
            except Exception as error:
                raise Wrong(f"loaded, and {file} is no safetensors file: {error!r}") from None
    return held


def _same(name: str, value: np.ndarray, want: Any) -> None:
    show = f"print(numbers()[{name!r}])"
    if want is None:
        raise Wrong(f"{name} was loaded, and no file of the folder holds it", show)
    rounded = np.asarray(want).astype(value.dtype)
    if rounded.shape != value.shape or not np.array_equal(rounded, value, equal_nan=True):
        raise Wrong(
            f"{name} is {value.tolist()}, and the file holds {np.asarray(want).tolist()}", show
        )
    if (np.isfinite(np.asarray(want, np.float64)) != np.isfinite(value.astype(np.float64))).any():
        raise Wrong(f"{name} became infinite in {value.dtype}: {np.asarray(want).tolist()}", show)
