"""Files that programs leave on disk: latents, checkpoints and `maxattn tune`'s, some damaged."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.calls import BOTH, Call, check_of
from tests.fuzz.case import Case, Check, Machine, Names, Wrong
from tests.fuzz.masks import Sizes
from tests.fuzz.odd import ODD, mutated_bytes, mutated_file, pack, unpack
from tests.fuzz.operands import Operands

# ---- latents: every example as it was written, or all refused ------------------------------------

LATENTS = """\
import pathlib, sys, tempfile
sys.path.insert(0, 'examples')
from maxattn_examples.train.data import LatentFolder
folder = pathlib.Path(tempfile.mkdtemp())
for name, data in {files!r}.items():
    (folder / name).write_bytes(data)
source = LatentFolder(str(folder))
examples = [source[i] for i in range(len(source))]
empty = source.empty
"""
SHAPES = {"latents": (2, 1, 2, 2), "text": (3, 4)}


def draw_latents(rng: Random, machine: Machine) -> Case:
    """Draw shards, some of them mutated, and the empty text."""
    numbers = np.random.default_rng(rng.randrange(10**6))
    metadata = {"scaled": rng.choice(["true", "true", "true", "false"]), "source": "x", "model": ""}
    files = {}
    for shard in range(rng.choice([1, 2, 2])):
        rows = rng.choice([1, 2, 3])
        arrays = {n: numbers.standard_normal((rows, *s)).astype("<f4") for n, s in SHAPES.items()}
        is_odd = rng.random() < 0.5
        data = mutated_file(rng, arrays, metadata) if is_odd else pack(arrays, metadata)
        files[f"latents-{shard:05}.safetensors"] = data
    if rng.random() < 0.4:
        text = {"negative_text": np.ones((1, *SHAPES["text"]), "<f4")}
        is_odd = rng.random() < 0.5
        files["empty.safetensors"] = mutated_file(rng, text) if is_odd else pack(text)
    return Case(LATENTS.format(files=files), _check_of_latents(files), seconds=10)


def _check_of_latents(files: dict[str, bytes]) -> Check:
    def check(names: Names) -> None:
        shards = [unpack(files[file])[0] for file in sorted(files) if "latents" in file]
        want = [
            {name: array[i] for name, array in shard.items()}
            for shard in shards
            for i in range(len(shard["latents"]))
        ]
        got = names["examples"]
        if len(got) != len(want):
            what = f"{len(got)} examples, and the files have {len(want)}"
            raise Wrong(what, "print(len(source))")
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            if one.keys() != other.keys() or any(
                not np.array_equal(one[n], other[n], equal_nan=True) for n in one
            ):
                raise Wrong(f"example {i} is not that of the file", f"print(source[{i}])")

    return check


# ---- checkpoints of the examples: resumed as saved, or refused -----------------------------------

CHECKPOINT = """\
import pathlib, random, shutil, sys, tempfile, types
sys.path.insert(0, 'examples')
from maxattn_examples.train.checkpoint import Checkpoints
from maxattn_examples.train.task import Fixed
class Settings:
    def resolved(self):
        return {{'model': {{'width': 4}}}}
folder = tempfile.mkdtemp()
training = types.SimpleNamespace(output_dir=folder, keep_checkpoints=2)
fixed = Fixed(('model',), ())
state = {{'w': jnp.arange(6.0).reshape(2, 3), 'n': jnp.ones(4)}}
with Checkpoints(Settings(), training, fixed) as saved:
    saved.save(state, {{'at': 3}}, [1.0, 2.0], {{}})
files = sorted(p for p in pathlib.Path(folder).rglob('*') if p.is_file())
path = files[{which} % len(files)]
data = path.read_bytes()
at = int({at} * len(data))
{how}
with Checkpoints(Settings(), training, fixed) as opened:
    losses = opened.losses
    got = opened.load(state) if opened.step else state
"""
BYTES = ("data[:at]", "data[at:]", "b''", "data[:at] + bytes([255]) + data[at + 1:]", "data")
DAMAGES = (
    *(f"path.write_bytes({x})" for x in (*BYTES, "bytes([255]) * len(data)")),
    "path.unlink()",
)


def draw_checkpoint(rng: Random, machine: Machine) -> Case:
    """Draw the file to damage, the place and the damage."""
    which, at, how = rng.randrange(1000), rng.random(), rng.choice(DAMAGES)
    return Case(CHECKPOINT.format(which=which, at=at, how=how), _check_checkpoint)


def _check_checkpoint(names: Names) -> None:
    show = "print(path, losses, got)"
    if names["losses"] not in ([1.0, 2.0], []):
        raise Wrong(f"the losses are {names['losses']}", show)
    for name, value in names["state"].items():
        if not np.array_equal(np.asarray(names["got"][name]), np.asarray(value)):
            raise Wrong(f"{name} is not what was saved, in {names['path'].name}", show)


# ---- the file of `maxattn tune`: a damaged one changes no result and refuses no call -------------

TUNED = """\
import pathlib, tempfile
from unittest import mock
from maxattn.target import Target, installed
from maxattn.tuned import versions_of
from maxattn.tuned.kernels import versions_text
folder = pathlib.Path(tempfile.mkdtemp())
versions = versions_of('memory_efficient', installed()).encode()
packages = versions_text(installed()).encode()
kind = Target.here().device_kind.encode()
data = {data!r}.replace(b'VERSIONS', versions).replace(b'KIND', kind)
(folder / 'tuned.json').write_bytes(data.replace(b'PACKAGES', packages))
os.environ['MAXATTN_CACHE'] = str(folder)
try:
{body}finally:
    os.environ['MAXATTN_CACHE'] = os.devnull
"""
SIZES = ("query_chunk_size", "key_chunk_size", "hardware", "attention", "nothing")
CALL = "B=1 T=S=8 N=2 H=8 f32 Full()"


def draw_tuned(rng: Random, machine: Machine) -> Case:
    """Draw a file of measurements and a call that reads it."""
    named = {"attention": "dot_product", "use_memory_efficient_attention": True}
    settings, data = rng.choice([named, {"attention": "auto"}]), _draw_measurements(rng)
    sizes, seed = Sizes(1, 8, 8, 2, 2, 8), rng.randrange(10**6)
    operands = Operands(sizes, "float32", "normal", None, None, "", "float32", "", None, seed)
    body = "".join(f"    {x}\n" for x in (Call(operands, settings).text() + BOTH).splitlines())
    source = TUNED.format(data=data, body=body)
    return Case(source, check_of(operands), never_refused=True, seconds=20)


def _draw_measurements(rng: Random) -> bytes:
    many = range(rng.choice([1, 2, 3]))
    entries: list[Any] = [rng.choice([_draw_chunks, _draw_kernels])(rng) for _ in many]
    whole: dict[str, Any] = {"version": 1, "measurements": entries}
    for _ in range(rng.choice([0, 1, 1, 2])):
        _damage(rng, whole)
    data = json.dumps(whole).encode()
    if rng.random() < 0.25:
        data = mutated_bytes(rng, data)
    return rng.choice([b"[" * 5000, b"", b"null"]) if rng.random() < 0.05 else data


def _draw_kernels(rng: Random) -> dict[str, Any]:
    names = rng.sample(["dot_product", "memory_efficient", "cudnn", "nothing"], 2)
    forward, backward = ({name: [rng.random()] * 5 for name in names} for _ in range(2))
    return {
        "device_kind": "KIND", "versions": "PACKAGES", "call": CALL, "settings": "", "data": "",
        "forward_ms": forward, "backward_ms": backward,
        "failed": rng.choice([{}, {"dot_product": "forward: no"}]),
    }  # fmt: skip


def _draw_chunks(rng: Random) -> dict[str, Any]:
    sizes = {"query_chunk_size": rng.choice([1, 3, 128]), "key_chunk_size": rng.choice([2, 64])}
    return {
        "device_kind": "KIND", "versions": "VERSIONS", "kernel": "memory_efficient",
        "call": f"self-attention {CALL}", "sizes": sizes, "forward_ms": rng.random(),
        "training_ms": rng.choice([None, rng.random()]),
    }  # fmt: skip


def _damage(rng: Random, whole: dict[str, Any]) -> None:
    """Put an odd value into an entry, into its sizes, or in place of the whole."""
    place, entries = rng.choice(["entry"] * 2 + ["sizes"] * 2 + ["whole"]), whole["measurements"]
    if place == "entry":
        entry = rng.choice([m for m in entries if isinstance(m, dict)])
        entry[rng.choice([*entry] or ["kernel"])] = rng.choice(ODD)
    elif place == "sizes":
        entry = rng.choice([*entries, None])
        sizes = entry.get("sizes") if isinstance(entry, dict) else None
        if isinstance(sizes, dict):
            sizes[rng.choice(SIZES)] = rng.choice([*ODD, "tpu"])
    elif rng.random() < 0.5:
        whole["version"] = rng.choice(ODD)
    else:
        entries.append(rng.choice(ODD))
