"""LoRA under published names: drawn layers, ranks, alphas and dtypes, merged as in float64.

The names are those of tests/weights/test_name_tables.py; the expected sums are made here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.float64 import EPS, F32, TINY
from tests.fuzz.odd import pack
from tests.fuzz.weights import check_unchanged
from tests.weights.test_name_tables import PUBLISHED, parts_of

MODEL = """\
import pathlib, tempfile
from flax import nnx
def tree(layers):
    found = {{}}
    for name, size in layers.items():
        first, _, rest = name.partition('.')
        found.setdefault(first, {{}})[rest] = size
    return nnx.Dict({{
        first: linear(*rest['']) if '' in rest else tree(rest) for first, rest in found.items()}})
rng = np.random.default_rng({seed})
def linear(width, height):
    layer = nnx.eval_shape(lambda: nnx.Linear(width, height, rngs=nnx.Rngs(0)))
    nnx.update(layer, jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), {dtype!r}), nnx.state(layer)))
    return layer
model = tree({layers!r})
path = pathlib.Path(tempfile.mkdtemp()) / 'l.safetensors'
path.write_bytes({data!r})
numbers = lambda: {{k: np.asarray(v) for k, v in ma.weights.to_diffusers(model).items()}}
before = numbers()
"""
MERGE = "layers = ma.weights.merge_lora(model, path, {words})\n"
STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16}
# What is wrong with a file: such a layer is refused, or left out where that is asked.
FAULTS = (
    "half a pair",
    "another width",
    "another height",
    "no such layer",
    "rank zero",
    "infinite",
)
Pair = tuple[np.ndarray, np.ndarray, float]  # A, B and alpha / rank


class Drawn:
    """The layers of a model, and the tensors of a file that changes some of them."""

    def __init__(self, rng: Random) -> None:
        names, self.begin, self.ends = PUBLISHED[rng.choice(list(PUBLISHED))]
        self.rng, self.numbers = rng, np.random.default_rng(rng.randrange(10**6))
        parts = parts_of(names)
        each = [layer for those in parts.values() for layer in those]
        self.layers = {x: (rng.choice([2, 4, 5]), rng.choice([3, 4, 5])) for x in each}
        for those in parts.values():  # rows of one tensor read the same channels
            self.layers |= {x: (self.layers[those[0]][0], self.layers[x][1]) for x in those}
        self.dtype = rng.choice(["float32", "float32", "bfloat16", "float16"])
        self.stored = rng.choice(list(STORED))
        self.tensors: dict[str, np.ndarray] = {}
        self.changes: dict[str, Pair] = {}
        self.settings = self._draw_settings()
        some = rng.sample(list(parts), min(len(parts), rng.choice([1, 3, 8, 99])))
        for name in some:
            self._add(name, parts[name])
        self.fault = rng.choice(FAULTS) if rng.random() < 0.3 else ""
        if self.fault:
            self._damage(some, parts)

    def _draw_settings(self) -> dict[str, Any]:
        """Draw peft's settings of the whole file, if it has any."""
        if self.rng.random() < 0.6:
            return {}
        settings: dict[str, Any] = {"r": 2, "lora_alpha": self.rng.choice([1, 2, 0.5, 16])}
        return settings | ({"use_rslora": True} if self.rng.random() < 0.3 else {})

    def _written(self, name: str) -> str:
        return self.begin + (name.replace(".", "_") if self.begin.endswith("_") else name)

    def _draw(self, *shape: int) -> np.ndarray:
        return self.numbers.standard_normal(shape).astype(STORED[self.stored])

    def _add(self, name: str, those: list[str]) -> None:
        """Draw a pair; its rows belong to one layer after the other."""
        rank, at = self.rng.choice([1, 2, 3, 7]), self._written(name)
        heights = [self.layers[layer][1] for layer in those]
        a, b = self._draw(rank, self.layers[those[0]][0]), self._draw(sum(heights), rank)
        self.tensors |= {f"{at}.{self.ends[0]}.weight": a, f"{at}.{self.ends[1]}.weight": b}
        root = math.sqrt(rank) if self.settings.get("use_rslora") else rank
        factor = self.settings.get("lora_alpha", root) / root
        if self.rng.random() < 0.5:
            alpha = self.rng.choice([1.0, 4.0, 0.0, -2.0, 0.5])
            self.tensors[f"{at}.alpha"] = np.full(self.rng.choice([(), (1,)]), alpha, "<f4")
            factor = alpha / rank
        ends = np.cumsum(heights)[:-1]
        for layer, rows in zip(those, np.split(b.astype(np.float64), ends), strict=True):
            self.changes[layer] = (a.astype(np.float64), rows, factor)

    def _damage(self, some: list[str], parts: Mapping[str, list[str]]) -> None:
        name = self.rng.choice(some)
        a, b = (f"{self._written(name)}.{end}.weight" for end in self.ends)
        if self.fault == "half a pair":
            del self.tensors[self.rng.choice([a, b])]
        elif self.fault == "another width":
            self.tensors[a] = self._draw(len(self.tensors[a]), 9)
        elif self.fault == "another height":
            self.tensors[b] = self._draw(29, self.tensors[b].shape[1])
        elif self.fault == "rank zero":
            self.tensors[a], self.tensors[b] = self.tensors[a][:0], self.tensors[b][:, :0]
        elif self.fault == "infinite":
            self.tensors[a][0, 0] = np.inf
        else:
            other = f"{self.begin}nothing_like_it"  # another prefix would be another model's
            self.tensors = {
                k.replace(self._written(name), other): x for k, x in self.tensors.items()
            }
        for layer in parts[name]:
            del self.changes[layer]


def draw(rng: Random, machine: Machine) -> Case:
    """Draw a program's names, and a file of them, in few draws with one fault."""
    drawn, scale = Drawn(rng), rng.choice([1.0, 1.0, 0.5, -2.0])
    strict, given = rng.random() < 0.6, rng.random() < 0.2
    settings = {"lora_adapter_metadata": json.dumps(drawn.settings)} if drawn.settings else None
    words = f"scale={scale}, strict={strict}" + (f", prefix={drawn.begin!r}" if given else "")
    source = MODEL.format(
        seed=rng.randrange(10**6), dtype=drawn.dtype, layers=drawn.layers,
        data=pack(drawn.tensors, settings),
    )  # fmt: skip
    # `infinite` is refused in each case, and so is half a pair of a known layer.
    is_whole = not drawn.fault
    check = _check_of(drawn, scale, strict)
    return Case(source + MERGE.format(words=words), check, check_unchanged, is_whole, seconds=20)


def _check_of(drawn: Drawn, scale: float, strict: bool) -> Check:
    def check(names: Names) -> None:
        if drawn.fault and strict:
            raise Wrong(f"{drawn.fault}, and it is merged", "print(layers)")
        if set(names["layers"]) != set(drawn.changes):
            differ = sorted(set(names["layers"]) ^ set(drawn.changes))
            raise Wrong(f"{differ} of the layers differ", "print(layers)")
        after = names["numbers"]()
        for name, value in names["before"].items():
            pair = drawn.changes.get(name.removesuffix(".weight"))
            if pair is None or name.endswith(".bias"):
                if value.tobytes() != after[name].tobytes():
                    raise Wrong(f"{name} is changed", f"print(numbers()[{name!r}])")
                continue
            _compare(name, value.astype(np.float64), after[name], scale, pair, drawn.dtype)

    return check


def _compare(name: str, old: Any, new: Any, scale: float, pair: Pair, dtype: str) -> None:
    """Compare one sum, which is rounded once to the parameter's dtype."""
    a, b, factor = pair
    want, size = old + scale * factor * (b @ a), abs(scale * factor) * (abs(b) @ abs(a))
    bound = EPS[dtype] * abs(want) + (len(a) + 8) * F32 * (size + abs(old)) + TINY[dtype]
    off = abs(new.astype(np.float64) - want)
    if not (off <= bound).all():
        raise Wrong(f"{name} is off by {off.max():.3g}", f"print(numbers()[{name!r}])")
