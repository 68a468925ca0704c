"""Folders of latents that the examples train on: every example as written, or all refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from tests.fuzz.case import Case, Machine, Names, Wrong
from tests.fuzz.safetensors_bytes import mutated, pack, unpack

SOURCE = """\
import pathlib, sys, tempfile
sys.path.insert(0, 'examples')
from train.latents import LatentFolder
folder = pathlib.Path(tempfile.mkdtemp())
for name, data in {files!r}.items():
    (folder / name).write_bytes(data)
source = LatentFolder(str(folder))
examples = [source[i] for i in range(len(source))]
empty = source.empty
"""
SHAPES = {"latents": (2, 1, 2, 2), "text": (3, 4)}


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw shards, of which one is mutated in most draws, and the empty text."""
    numbers = np.random.default_rng(rng.randrange(10**6))
    metadata = {"scaled": rng.choice(["true", "true", "true", "false"]), "source": "x", "model": ""}
    files = {}
    for shard in range(rng.choice([1, 2, 2])):
        rows = rng.choice([1, 2, 3])
        arrays = {n: numbers.standard_normal((rows, *s)).astype("<f4") for n, s in SHAPES.items()}
        write = mutated if rng.random() < 0.5 else lambda rng, *x: pack(*x)
        files[f"latents-{shard:05}.safetensors"] = write(rng, arrays, metadata)
    if rng.random() < 0.4:
        held = {"negative_text": np.ones((1, *SHAPES["text"]), "<f4")}
        files["empty.safetensors"] = mutated(rng, held) if rng.random() < 0.5 else pack(held)
    source = SOURCE.format(files=files)
    return Case("latents", seed, source, _check_of(files), facts={"files": files}, seconds=10)


def _check_of(files: dict[str, bytes]) -> Callable[[Names], None]:
    def check(names: Names) -> None:
        want = [
            example for file in sorted(files) if "latents" in file for example in _rows(files[file])
        ]
        got = names["examples"]
        if len(got) != len(want):
            raise Wrong(
                f"{len(got)} examples, and the files hold {len(want)}", "print(len(source))"
            )
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            if one.keys() != other.keys() or any(
                not np.array_equal(one[n], other[n], equal_nan=True) for n in one
            ):
                raise Wrong(f"example {i} is not what the file holds", f"print(source[{i}])")

    return check


def _rows(data: bytes) -> list[dict[str, np.ndarray]]:
    try:
        held = unpack(data)
    except Exception as error:
        raise Wrong(f"read, and a shard is no safetensors file: {error!r}") from None
    return [{name: array[i] for name, array in held.items()} for i in range(len(held["latents"]))]
