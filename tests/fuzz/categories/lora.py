"""LoRA files and their alphas: merged as W + alpha / rank B A, or refused with nothing changed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.case import Case, Machine, Names, Wrong
from tests.fuzz.categories.weights import unchanged
from tests.fuzz.mutate import mutated_text
from tests.fuzz.safetensors_bytes import mutated, pack, unpack

SOURCE = """\
import pathlib, tempfile
from flax import nnx
class Model(nnx.Module):
    def __init__(self):
        self.to_q = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
        self.{long} = nnx.Linear(5, 3, rngs=nnx.Rngs(1))
model = Model()
folder = pathlib.Path(tempfile.mkdtemp())
(folder / 'l.safetensors').write_bytes({data!r})
numbers = lambda: {{k: np.asarray(v) for k, v in ma.weights.to_diffusers(model).items()}}
before = numbers()
layers = ma.weights.merge_lora(model, folder / 'l.safetensors', scale={scale})
"""
LONG = "a_layer_with_a_name_of_many_letters_"
PATTERNS = (
    "to_q", ".*", LONG, "([a-z_.]+)+X", "(a|a)*b", "a{99999999999}", "(" * 5000, "(", "",
    "to_.", "(?i)TO_Q", "[", "(a*)*$b", "\\Z", "(?P<x>t)o_q", "(?<=a)x",
)  # fmt: skip
# What matches the same names, and does not take Python's own matcher forever.
SAME = {"([a-z_.]+)+X": "[a-z_.]+X", "(a|a)*b": "a*b", "(a*)*$b": "a*$b"}
NUMBERS = (
    1,
    2,
    0.5,
    8,
    0,
    -1,
    1e39,
    1e308,
    10**400,
    True,
    "4",
    None,
    [2],
    {"a": 1},
    float("nan"),
    float("inf"),
)
MORE = {
    "use_dora": True, "peft_type": "IA3", "init_lora_weights": "pissa", "use_qalora": True,
    "layer_replication": [[0, 1]], "rank_pattern": {"to_q": 3},
}  # fmt: skip
SCALES = ("1.0", "0.5", "-2", "1e30", "0.0")


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw matrices, alphas and metadata, whole or mutated."""
    tensors, metadata = _tensors(rng), _metadata(rng)
    header = {"lora_adapter_metadata": metadata} if metadata is not None else None
    data = mutated(rng, tensors, header) if rng.random() < 0.3 else pack(tensors, header)
    scale = rng.choice(SCALES)
    check = _check_of(data, float(scale))
    facts = {"metadata": metadata}
    source = SOURCE.format(data=data, scale=scale, long=LONG)
    return Case("lora", seed, source, check, unchanged, facts, seconds=5)


def _tensors(rng: Random) -> dict[str, np.ndarray]:
    numbers, rank = np.random.default_rng(rng.randrange(10**6)), rng.choice([1, 2, 3])
    down, up = rng.choice([("lora_A", "lora_B"), ("lora.down", "lora.up")])
    sizes, tensors = {"to_q": (4, 5), LONG: (5, 3)}, {}
    for layer in rng.sample(list(sizes), rng.choice([1, 2])):
        width, height = sizes[layer]
        tensors[f"{layer}.{down}.weight"] = numbers.standard_normal((rank, width)).astype("<f4")
        tensors[f"{layer}.{up}.weight"] = numbers.standard_normal((height, rank)).astype("<f4")
        if rng.random() < 0.3:
            alpha = rng.choice([1.0, 4.0, 0.0, np.nan, np.inf, -2.0])
            tensors[f"{layer}.alpha"] = np.full(
                rng.choice([(), (1,), (2,)]),
                alpha,
                rng.choice(["<f4", "<i4"]) if math.isfinite(alpha) else "<f4",
            )
    return tensors


def _metadata(rng: Random) -> str | None:
    """Draw peft's settings as JSON, some of them wrong."""
    if rng.random() < 0.3:
        return None
    said: dict[str, Any] = {"lora_alpha": rng.choice(NUMBERS[:3] * 12 + NUMBERS), "r": 2}
    if rng.random() < 0.4:
        said["alpha_pattern"] = {
            rng.choice(PATTERNS[:3] * 12 + PATTERNS): rng.choice([2, 6, 3] * 8 + [*NUMBERS])
        }
    said |= {key: value for key, value in MORE.items() if rng.random() < 0.06}
    said |= {"use_rslora": True} if rng.random() < 0.3 else {}
    if rng.random() < 0.1:
        said = {f"unet.{key}": value for key, value in said.items()}
    text = json.dumps(said)
    return mutated_text(rng, text) if rng.random() < 0.1 else text


def _check_of(data: bytes, scale: float) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        held = _read(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = (header.get("__metadata__") or {}).get("lora_adapter_metadata", "{}")
        try:
            said = json.loads(text)
        except ValueError as error:
            raise Wrong(f"merged, and its metadata are no JSON: {text[:40]!r}") from error
        said = {key.rpartition(".")[2]: value for key, value in said.items()}
        if odd := [
            k for k in ("init_lora_weights", "use_qalora", "layer_replication") if said.get(k)
        ]:
            raise Wrong(f"merged as plain LoRA, and {odd[0]} is set")
        after = names["numbers"]()
        for layer in ("to_q", LONG):
            want = names["before"][f"{layer}.weight"] + _change(layer, held, said, scale)
            _close(f"{layer}.weight", after[f"{layer}.weight"], want)

    return check


def _read(data: bytes) -> dict[str, np.ndarray]:
    try:
        return unpack(data)
    except Exception as error:
        raise Wrong(f"merged, and it is no safetensors file: {error!r}") from None


def _change(layer: str, held: dict[str, np.ndarray], said: Any, scale: float) -> np.ndarray:
    """Return scale * alpha / rank B A of one layer, 0 where there is none."""
    a, b = (
        next((held[n] for name in names if (n := f"{layer}.{name}.weight") in held), None)
        for names in (("lora_A", "lora.down"), ("lora_B", "lora.up"))
    )
    if a is None or b is None:
        return np.zeros(())
    rank = a.shape[0]
    own = held.get(f"{layer}.alpha")
    if own is not None:
        return scale * float(own.reshape(())) / rank * (b @ a) if own.size == 1 else b * np.nan
    return scale * _alpha(layer, rank, said) * (b @ a)


def _alpha(layer: str, rank: int, said: dict[str, Any]) -> float:
    alpha = said.get("lora_alpha", rank)
    for pattern, value in (said.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({SAME.get(pattern, pattern)})$", layer):
            alpha = value
            break
    return alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)


def _close(name: str, got: np.ndarray, want: np.ndarray) -> None:
    if not np.allclose(got, want, rtol=1e-5, atol=1e-5 * max(float(abs(want).max()), 1e-3)):
        line = f"print(numbers()[{name!r}])"
        raise Wrong(f"{name} is off by {abs(got - want).max():.3g}", line)
