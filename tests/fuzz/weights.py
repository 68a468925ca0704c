"""Weights and LoRAs in safetensors: loaded exactly, or refused without any change."""

from __future__ import annotations

import json
import math
import re
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.odd import ODD, mutated_file, mutated_text, pack, unpack

MODEL = """\
import pathlib, tempfile
from flax import nnx
class Model(nnx.Module):
    def __init__(self):
{layers}model = Model()
{host}folder = pathlib.Path(tempfile.mkdtemp()) / 'in'
folder.mkdir()
for name, data in {files!r}.items():
    path = (folder / name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
numbers = lambda: {{k: np.asarray(v) for k, v in ma.weights.to_diffusers(model).items()}}
before = numbers()
"""
LAYERS = """\
        self.to_q = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype={dtype!r})
        self.norm = nnx.LayerNorm(2, rngs=nnx.Rngs(0))
"""
LOAD = "loaded = ma.weights.load_diffusers(model, folder{file}, strict={strict})\n"
SHAPES = {"to_q.weight": (2, 3), "to_q.bias": (2,), "norm.weight": (2,), "norm.bias": (2,)}
OUTSIDE = "../x.safetensors"
ODD_FILES = (
    OUTSIDE, "/etc/passwd", "c.safetensors", "", "a" * 300, 5, None, "b.safetensors", "m.pt",
)  # fmt: skip


def draw_weights(rng: Random, machine: Machine) -> Case:
    """Draw one file, or two and their index, whole or mutated."""
    tensors = _draw_tensors(rng)
    if rng.random() < 0.35:
        files = _draw_index(rng, tensors)
    else:
        one = pack(tensors) if rng.random() < 0.3 else mutated_file(rng, tensors)
        files = {"m.safetensors": one}
    file = rng.choice(["", "", " / 'm.safetensors'"])
    strict, dtype = rng.random() < 0.7, rng.choice(["float32", "float32", "bfloat16", "float16"])
    host = "nnx.update(model, jax.device_get(nnx.state(model)))\n" if rng.random() < 0.05 else ""
    source = MODEL.format(layers=LAYERS.format(dtype=dtype), host=host, files=files)
    source += LOAD.format(file=file, strict=strict)
    return Case(source, _check_of_weights(files), check_unchanged, seconds=10)


def _draw_tensors(rng: Random) -> dict[str, np.ndarray]:
    """Draw the model's tensors, rarely with another shape, dtype or odd numbers."""
    numbers = np.random.default_rng(rng.randrange(10**6))
    dtype = rng.choice(["<f4", "<f4", "<f2", "<f8"])
    tensors = {name: numbers.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    name, odd = rng.choice(list(SHAPES)), rng.random()
    if odd < 0.1:
        tensors[name].flat[0] = rng.choice([np.nan, np.inf, 6e4, 3.4e38 if dtype != "<f2" else 1.0])
    elif odd < 0.15:
        tensors[name] = tensors[name].astype(rng.choice(["<i4", "|u1", "<i8"]))
    elif odd < 0.2:
        tensors[name] = tensors[name].reshape(rng.choice([(-1,), (1, -1), (-1, 1)]))
    return tensors


def _draw_index(rng: Random, tensors: dict[str, np.ndarray]) -> dict[str, bytes]:
    """Split the tensors over two files, and mutate their index or one of them."""
    names = list(tensors)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    where: dict[str, Any] = {name: file for file, part in parts.items() for name in part}
    other = rng.choice(ODD_FILES)
    if rng.random() < 0.4:
        where[rng.choice([*names, "more"])] = other
    index = json.dumps({"metadata": {}, "weight_map": where})
    index = mutated_text(rng, index) if rng.random() < 0.3 else index
    index = "[" * 5000 if rng.random() < 0.03 else index
    files = {file: pack({n: tensors[n] for n in part}) for file, part in parts.items()}
    if rng.random() < 0.3:
        files["a.safetensors"] = mutated_file(rng, {n: tensors[n] for n in names[:2]})
    files |= {OUTSIDE: pack(tensors)} if other == OUTSIDE else {}
    return files | {"m.safetensors.index.json": index.encode("utf-8", "replace")}


def check_unchanged(names: Names) -> None:
    """Raise `Wrong` if a refusal changed a parameter."""
    after = names["numbers"]()
    for name, value in names["before"].items():
        if value.tobytes() != after[name].tobytes():
            show = f"print(before[{name!r}], numbers()[{name!r}])"
            raise Wrong(f"refused, and {name} is changed", show)


def _check_of_weights(files: dict[str, bytes]) -> Check:
    def check(names: Names) -> None:
        stored: dict[str, np.ndarray] = {}
        for file, data in files.items():
            if file.endswith(".safetensors") and file != OUTSIDE:
                stored |= unpack(data)[0]
        for name, value in names["numbers"]().items():
            is_missing = name in names["loaded"].missing
            _compare(name, value, names["before"][name] if is_missing else stored.get(name))

    return check


def _compare(name: str, value: np.ndarray, want: Any) -> None:
    show = f"print(numbers()[{name!r}])"
    if want is None:
        raise Wrong(f"{name} was loaded, and no file of the folder has it", show)
    want = np.asarray(want)
    rounded = want.astype(value.dtype)
    if rounded.shape != value.shape or not np.array_equal(rounded, value, equal_nan=True):
        raise Wrong(f"{name} is {value.tolist()}, and the file has {want.tolist()}", show)
    if (np.isfinite(want.astype(np.float64)) != np.isfinite(value.astype(np.float64))).any():
        raise Wrong(f"{name} became infinite in {value.dtype}: {want.tolist()}", show)


# ---- LoRA: W + scale * alpha / rank * B A --------------------------------------------------------

LONG = "a_layer_with_a_name_of_many_letters_"
LORA_LAYERS = f"""\
        self.to_q = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        self.{LONG} = nnx.Linear(5, 3, rngs=nnx.Rngs(1))
"""
MERGE = "layers = ma.weights.merge_lora(model, folder / 'l.safetensors', scale={scale})\n"
PATTERNS = (
    "to_q", ".*", LONG, "([a-z_.]+)+X", "(a|a)*b", "a{99999999999}", "(" * 5000, "(", "",
    "to_.", "(?i)TO_Q", "[", "(a*)*$b", "\\Z", "(?P<x>t)o_q", "(?<=a)x",
)  # fmt: skip
# What matches the same names, and does not take Python's own matcher forever.
SAME = {"([a-z_.]+)+X": "[a-z_.]+X", "(a|a)*b": "a*b", "(a*)*$b": "a*$b"}
MORE = {
    "use_dora": True, "peft_type": "IA3", "init_lora_weights": "pissa", "use_qalora": True,
    "layer_replication": [[0, 1]], "rank_pattern": {"to_q": 3},
}  # fmt: skip
NOT_PLAIN = ("init_lora_weights", "use_qalora", "layer_replication")


def draw_lora(rng: Random, machine: Machine) -> Case:
    """Draw matrices, alphas and metadata, whole or mutated."""
    tensors, settings = _draw_matrices(rng), _draw_adapter(rng)
    metadata = {"lora_adapter_metadata": settings} if settings is not None else None
    is_whole = rng.random() >= 0.3
    data = pack(tensors, metadata) if is_whole else mutated_file(rng, tensors, metadata)
    scale = rng.choice(("1.0", "0.5", "-2", "1e30", "0.0"))
    source = MODEL.format(layers=LORA_LAYERS, host="", files={"l.safetensors": data})
    check = _check_of_lora(data, float(scale))
    return Case(source + MERGE.format(scale=scale), check, check_unchanged, seconds=5)


def _draw_matrices(rng: Random) -> dict[str, np.ndarray]:
    numbers, rank = np.random.default_rng(rng.randrange(10**6)), rng.choice([1, 2, 3])
    down, up = rng.choice([("lora_A", "lora_B"), ("lora.down", "lora.up")])
    sizes, tensors = {"to_q": (4, 5), LONG: (5, 3)}, {}
    for layer in rng.sample(list(sizes), rng.choice([1, 2])):
        width, height = sizes[layer]
        tensors[f"{layer}.{down}.weight"] = numbers.standard_normal((rank, width)).astype("<f4")
        tensors[f"{layer}.{up}.weight"] = numbers.standard_normal((height, rank)).astype("<f4")
        if rng.random() < 0.3:
            alpha, shape = rng.choice([1.0, 4.0, 0.0, np.nan, np.inf, -2.0]), [(), (1,), (2,)]
            shape = rng.choice(shape)
            dtype = rng.choice(["<f4", "<i4"]) if math.isfinite(alpha) else "<f4"
            tensors[f"{layer}.alpha"] = np.full(shape, alpha, dtype)
    return tensors


def _draw_adapter(rng: Random) -> str | None:
    """Draw peft's settings as JSON, some of them wrong."""
    if rng.random() < 0.3:
        return None
    settings: dict[str, Any] = {"lora_alpha": rng.choice([1, 2, 0.5] * 15 + [*ODD]), "r": 2}
    if rng.random() < 0.4:
        pattern, alphas = rng.choice(PATTERNS[:3] * 12 + PATTERNS), [2, 6, 3] * 12 + [*ODD]
        settings["alpha_pattern"] = {pattern: rng.choice(alphas)}
    settings |= {key: value for key, value in MORE.items() if rng.random() < 0.06}
    settings |= {"use_rslora": True} if rng.random() < 0.3 else {}
    if rng.random() < 0.1:
        settings = {f"unet.{key}": value for key, value in settings.items()}
    text = json.dumps(settings)
    return mutated_text(rng, text) if rng.random() < 0.1 else text


def _check_of_lora(data: bytes, scale: float) -> Check:
    def check(names: Names) -> None:
        stored, metadata = unpack(data)
        text = metadata.get("lora_adapter_metadata", "{}")
        try:
            settings = json.loads(text)
        except ValueError as error:
            raise Wrong(f"merged, and its metadata are no JSON: {text[:40]!r}") from error
        settings = {key.rpartition(".")[2]: value for key, value in settings.items()}
        if odd := [k for k in NOT_PLAIN if settings.get(k)]:
            raise Wrong(f"merged as plain LoRA, and {odd[0]} is set")
        after = names["numbers"]()
        for name in ("to_q.weight", f"{LONG}.weight"):
            change = _change(name.removesuffix(".weight"), scale, stored, settings)
            got, want = after[name], names["before"][name] + change
            if not np.allclose(got, want, rtol=1e-5, atol=1e-5 * max(float(abs(want).max()), 1e-3)):
                off = abs(got - want).max()
                raise Wrong(f"{name} is off by {off:.3g}", f"print(numbers()[{name!r}])")

    return check


def _change(layer: str, scale: float, stored: Any, settings: Any) -> np.ndarray:
    """Return scale * alpha / rank * B A for one layer, 0 if it has no LoRA."""
    a, b = (
        next((stored[n] for name in names if (n := f"{layer}.{name}.weight") in stored), None)
        for names in (("lora_A", "lora.down"), ("lora_B", "lora.up"))
    )
    if a is None or b is None:
        return np.zeros(())
    rank, own = a.shape[0], stored.get(f"{layer}.alpha")
    if own is not None:
        return scale * float(own.reshape(())) / rank * (b @ a) if own.size == 1 else b * np.nan
    alpha = settings.get("lora_alpha", rank)
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({SAME.get(pattern, pattern)})$", layer):
            alpha = value
            break
    return scale * (alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)) * (b @ a)
