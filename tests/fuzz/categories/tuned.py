"""The file of `maxattn tune`, mutated: a damaged one never breaks a call, and changes no result."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from tests.fuzz.calls import BOTH, call_text, check_of, config_text
from tests.fuzz.case import Case, Machine
from tests.fuzz.mask_trees import Sizes
from tests.fuzz.mutate import mutated_bytes
from tests.fuzz.operands import Operands

SOURCE = """\
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
ODD = (0, -1, 1.5, "8", None, True, [], {}, 10**30, float("nan"), [1], {"a": 1}, "x" * 300)
CALL = "self-attention B=1 T=S=8 N=2 H=8 f32 Full()"


def draw(rng: Random, seed: int, machine: Machine) -> Case:
    """Draw a file of measurements and a call that reads it."""
    operands = Operands(
        Sizes(1, 8, 8, 2, 2, 8), "float32", "normal", None, None, "", "float32", "", None, seed
    )
    named = {"attention": "dot_product", "use_memory_efficient_attention": True}
    body = config_text(rng.choice([named, {"attention": "auto"}]))
    body = operands.text() + body + call_text(operands) + BOTH
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    source = SOURCE.format(data=_data(rng), body=indented)
    return Case("tuned", seed, source, check_of(operands), never_refused=True, seconds=20)


def _data(rng: Random) -> bytes:
    whole: dict[str, Any] = {
        "version": 1,
        "measurements": [_measurement(rng) for _ in range(rng.choice([1, 2, 3]))],
    }
    for _ in range(rng.choice([0, 1, 1, 2])):
        rng.choice([_in_entry, _in_entry, _in_sizes, _in_sizes, _in_whole])(rng, whole)
    data = json.dumps(whole).encode()
    if rng.random() < 0.25:
        data = mutated_bytes(rng, data)
    return rng.choice([b"[" * 5000, b"", b"null"]) if rng.random() < 0.05 else data


def _measurement(rng: Random) -> dict[str, Any]:
    return rng.choice([_of_sizes, _of_kernels])(rng)


def _of_kernels(rng: Random) -> dict[str, Any]:
    names = rng.sample(["dot_product", "memory_efficient", "cudnn", "nothing"], 2)
    forward, backward = ({name: [rng.random()] * 5 for name in names} for _ in range(2))
    return {
        "device_kind": "KIND", "versions": "PACKAGES", "call": CALL.removeprefix("self-attention "),
        "settings": "", "data": "", "forward_ms": forward, "backward_ms": backward,
        "failed": rng.choice([{}, {"dot_product": "forward: no"}]),
    }  # fmt: skip


def _of_sizes(rng: Random) -> dict[str, Any]:
    sizes = {"query_chunk_size": rng.choice([1, 3, 128]), "key_chunk_size": rng.choice([2, 64])}
    return {
        "device_kind": "KIND", "versions": "VERSIONS", "kernel": "memory_efficient", "call": CALL,
        "sizes": sizes, "forward_ms": rng.random(), "training_ms": rng.choice([None, rng.random()]),
    }  # fmt: skip


def _in_entry(rng: Random, whole: Any) -> None:
    entry = rng.choice([m for m in whole["measurements"] if isinstance(m, dict)])
    entry[rng.choice([*entry] or ["kernel"])] = rng.choice(ODD)


def _in_sizes(rng: Random, whole: Any) -> None:
    entry = rng.choice([*whole["measurements"], None])
    sizes = entry.get("sizes") if isinstance(entry, dict) else None
    if isinstance(sizes, dict):
        sizes[
            rng.choice(["query_chunk_size", "key_chunk_size", "hardware", "attention", "nothing"])
        ] = rng.choice([*ODD, "tpu"])


def _in_whole(rng: Random, whole: Any) -> None:
    if rng.random() < 0.5:
        whole["version"] = rng.choice(ODD)
    else:
        whole["measurements"].append(rng.choice(ODD))
