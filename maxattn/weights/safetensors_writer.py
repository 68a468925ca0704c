"""Write a safetensors file one tensor at a time: whatever its size, the host holds one of its
tensors.

The format: eight bytes that say how long the header is, a JSON header with dtype, shape and place
of each tensor, and their numbers one after the other, those of wider dtypes first so that all are
aligned.

Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxattn.errors import WeightsError

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
METADATA = {"format": "pt"}  # diffusers reads no file without it


class Form(NamedTuple):
    """Hold what a header says of a tensor.

    Args:
        shape: its sizes.
        dtype: as numpy, or ml_dtypes for bfloat16.
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """Count its bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def write(path: Path, forms: Mapping[str, Form], read: Callable[[str], np.ndarray]) -> None:
    """Write a file.

    Args:
        path: of the file.
        forms: of every tensor, by name.
        read: makes one tensor of that form; it is let go once it is written.

    Raises:
        WeightsError: a dtype that such files do not hold.
    """
    names = sorted(forms, key=lambda name: (-np.dtype(forms[name].dtype).itemsize, name))
    head = _header(names, forms)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            tensor = np.asarray(read(name), order="C")
            if (tensor.shape, tensor.dtype) != (forms[name].shape, np.dtype(forms[name].dtype)):
                raise AssertionError(
                    f"{name} is {tensor.dtype}{tensor.shape}, and the header says {forms[name]}"
                )
            tensor.reshape(-1).view(np.uint8).tofile(file)


def _header(names: list[str], forms: Mapping[str, Form]) -> bytes:
    said: dict[str, Any] = {"__metadata__": METADATA}
    place = 0
    for name in names:
        shape, dtype = forms[name]
        if np.dtype(dtype).name not in NAMES:
            rule = f"safetensors holds {', '.join(NAMES)}"
            raise WeightsError(name, np.dtype(dtype).name, rule, "cast the parameter")
        end = place + forms[name].bytes
        said[name] = {
            "dtype": NAMES[np.dtype(dtype).name],
            "shape": list(shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(said, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
