"""Odd values, texts and bytes mutated in one place, and a small writer and reader of safetensors.

A safetensors file is eight bytes of length, a header in JSON, and the numbers.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from random import Random
from typing import Any

import ml_dtypes
import numpy as np

from tests.fuzz.case import Wrong

TEXTS = (
    "\x00", "\n", " ", "\t", "é", "٣", "{", "}", "[", "]", ":", "-", '"', "'", "&a", "*a",
    "!!int", "<<", "~", "#", "%", "=",
)  # fmt: skip
CODES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "|u1",
    "BF16": "<u2", "BOOL": "|b1",
}  # fmt: skip
# Wrong for most entries of a JSON file.
ODD = (
    -1, 0, 1, 8, 2**31, 2**63, 2**64, 10**30, 10**400, 1.5, 1e39, 1e308, float("nan"),
    float("inf"), "1", "F32", "F8_E4M3", "Q4", "é", "x" * 300, None, True, [], {}, [[]], [2],
    {"a": 1},
)  # fmt: skip
NAMES = ("", "x" * 300, "é", ".x", "__metadata__", "../a")


def mutated_text(rng: Random, text: str) -> str:
    """Change a text in one place: cut, repeat, drop, replace or insert."""
    at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    other = rng.choice([*TEXTS, rng.choice(string.printable), str(rng.randint(-5, 10**6))])
    return rng.choice(
        [text[:at], text[:at] + text[end:], text[:at] + other + text[at:],
         text[:at] + other + text[at + 1 :], text[:end] + text[at:end] + text[end:]]
    )  # fmt: skip


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Change bytes in one place: cut at any byte, flip, drop, repeat, insert, or swap."""
    at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    other = rng.choice([bytes([rng.randrange(256)]), b"\xff" * 8, b"\x00" * 8, rng.randbytes(4)])
    return rng.choice(
        [data[:at], data[at:], data[:at] + data[end:], data[:at] + other + data[at:],
         data[:at] + other + data[at + len(other) :], data[:end] + data[at:end] + data[end:],
         data + other]
    )  # fmt: skip


def pack(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Format a safetensors file."""
    return _joined(*_head_and_body(tensors, metadata))


def mutated_file(rng: Random, tensors: Mapping[str, np.ndarray], metadata: Any = None) -> bytes:
    """Format a safetensors file whose header, or any byte, is wrong."""
    header, body = _head_and_body(tensors, metadata)
    if rng.random() < 0.4:
        return mutated_bytes(rng, _joined(header, body))
    name = rng.choice(list(header))
    entry = header[name]
    field = rng.choice(list(entry))
    change = rng.choice(["value", "value", "item", "rename", "drop", "length"])
    if change == "value":
        entry[field] = rng.choice(ODD)
    elif change == "item" and isinstance(entry[field], list) and entry[field]:
        entry[field][rng.randrange(len(entry[field]))] = rng.choice(ODD)
    elif change == "item":
        header[name] = rng.choice(ODD)
    elif change == "rename":
        other = rng.choice(NAMES)
        header[name + other if other == ".x" else other] = header.pop(name)
    elif change == "drop":
        entry.pop(field)
    else:
        header["more"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    return _joined(header, body if rng.random() < 0.8 else body[: rng.randint(0, len(body))])


def _head_and_body(
    tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None
) -> tuple[dict[str, Any], bytes]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    codes, body = {np.dtype(t): code for code, t in CODES.items()}, b""
    codes[np.dtype(ml_dtypes.bfloat16)] = "BF16"
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        offsets = [len(body), len(body) + len(data)]
        entry = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        header[name] = entry
        body += data
    return header, body


def _joined(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def unpack(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the tensors and metadata of a file that maxattn accepted; an error is a fault."""
    try:
        size = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
        metadata, tensors = header.pop("__metadata__", None) or {}, {}
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            flat = np.frombuffer(body[start:end], CODES[entry["dtype"]])
            if entry["dtype"] == "BF16":  # its bits are the upper half of a float32
                flat = (flat.astype("<u4") << 16).view("<f4")
            tensors[name] = flat.astype(np.float64).reshape(entry["shape"])
    except Exception as error:
        raise Wrong(f"accepted, and it is no safetensors file: {error!r}") from None
    return tensors, metadata
