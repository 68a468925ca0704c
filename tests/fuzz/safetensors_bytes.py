"""safetensors written and read by hand: eight bytes of length, a header in JSON, numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.mutate import mutated_bytes

CODES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I32": "<i4",
    "I64": "<i8",
    "U8": "|u1",
    "BF16": "<u2",
    "BOOL": "|b1",
}
ODD = (
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    1.5,
    "1",
    None,
    True,
    [],
    {},
    [[]],
    "F32",
    "F8_E4M3",
    "Q4",
    "é",
)


def pack(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Write a file."""
    header, body = head_and_body(tensors, metadata)
    return joined(header, body)


def head_and_body(tensors: Mapping[str, np.ndarray], metadata: Any) -> tuple[dict[str, Any], bytes]:
    """Return the header as a dict, and the numbers."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    codes, body = {np.dtype(t): code for code, t in CODES.items()}, b""
    for name, array in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        spread = [len(body), len(body) + len(data)]
        header[name] = {
            "dtype": codes[array.dtype],
            "shape": list(array.shape),
            "data_offsets": spread,
        }
        body += data
    return header, body


def joined(header: Any, body: bytes) -> bytes:
    """Put length, header and numbers together."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def mutated(rng: Random, tensors: Mapping[str, np.ndarray], metadata: Any = None) -> bytes:
    """Write a file in which the header, or any byte, is wrong."""
    header, body = head_and_body(tensors, metadata)
    if rng.random() < 0.4:
        return mutated_bytes(rng, joined(header, body))
    name = rng.choice(list(header))
    entry = header[name]
    field = rng.choice(list(entry))
    rng.choice([_value, _value, _item, _rename, _drop, _length])(rng, header, name, field)
    return joined(header, body if rng.random() < 0.8 else body[: rng.randint(0, len(body))])


def _value(rng: Random, header: Any, name: str, field: str) -> None:
    header[name][field] = rng.choice(ODD)


def _item(rng: Random, header: Any, name: str, field: str) -> None:
    if isinstance(header[name][field], list) and header[name][field]:
        header[name][field][rng.randrange(len(header[name][field]))] = rng.choice(ODD)
    else:
        header[name] = rng.choice(ODD)


def _rename(rng: Random, header: Any, name: str, field: str) -> None:
    header[rng.choice(["", "x" * 300, "é", name + ".x", "__metadata__", "../a"])] = header.pop(name)


def _drop(rng: Random, header: Any, name: str, field: str) -> None:
    header[name].pop(field)


def _length(rng: Random, header: Any, name: str, field: str) -> None:
    header["more"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}


def unpack(data: bytes) -> dict[str, np.ndarray]:
    """Read a file; any error means that it is none."""
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            flat = np.frombuffer(body[start:end], CODES[entry["dtype"]])
            tensors[name] = _values(flat, entry["dtype"]).reshape(entry["shape"])
    return tensors


def _values(flat: np.ndarray, code: str) -> np.ndarray:
    """Widen bfloat16, whose bits are the upper half of a float32."""
    if code == "BF16":
        return (flat.astype("<u4") << 16).view("<f4").astype(np.float64)
    return flat.astype(np.float64)
