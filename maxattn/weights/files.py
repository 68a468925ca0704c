"""safetensors on disk: one file, or a folder whose index spreads the tensors over several. Read
slice by slice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from maxattn.errors import WeightsError
from maxattn.weights.atomic_save import INDEX, swap_in
from maxattn.weights.safetensors_writer import NAMES, Form, write

SHARD_BYTES = 5 * 2**30  # the largest file that `save_tensors` writes, unless one tensor is larger
NOT_OURS = {"C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
DTYPES: dict[str, str] = {code: name for name, code in NAMES.items()} | NOT_OURS
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5}\.safetensors")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafeTensors(Mapping[str, "SafeTensor"]):
    """Offer the tensors of a safetensors file, or of a folder in diffusers' format, without reading
    them.

    Args:
        path: a .safetensors file, an .index.json, or a folder that holds one of them.

    Raises:
        WeightsError: nothing is there, a file of the index is missing or broken, or there are only
        pickles.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._where = _places(_entry_file(self.path))

    def __getitem__(self, name: str) -> SafeTensor:
        return SafeTensor(self._where[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def headers(self) -> tuple[dict[str, str], ...]:
        """Return what the header of each file says besides its tensors."""
        files = {id(file): file for file in self._where.values()}
        return tuple(file.metadata() or {} for file in files.values())


class SafeTensor:
    """Read slices of one tensor.

    Args:
        file: open, from `safetensors.safe_open`.
        name: the tensor's.
    """

    def __init__(self, file: Any, name: str) -> None:
        self._slice = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        self.dtype: str = DTYPES.get(self._slice.get_dtype()) or self._slice.get_dtype()
        self._whole = lambda: file.get_tensor(name)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._slice[index] if index else self._whole()


def _entry_file(path: Path) -> Path:
    """Return the index or the one file that a path means."""
    if path.is_file():
        if path.suffix in PICKLED:
            raise _pickled(path)
        return path
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = _without_lone_shards(sorted(path.glob(pattern))) if path.is_dir() else []
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(f.name for f in found)
            raise WeightsError(
                str(path), names, "one file or one index says which tensors are meant", "name one"
            )
    pickles = [f for f in path.glob("*") if f.suffix in PICKLED] if path.is_dir() else []
    if pickles:
        raise _pickled(pickles[0])
    rule = "it is a .safetensors file, or a folder that holds one or a .safetensors.index.json"
    raise WeightsError(
        "weights", str(path), rule, "give the folder of the model's transformer or unet"
    )


def _without_lone_shards(found: list[Path]) -> list[Path]:
    """Leave out the shards of a save that a single file replaced: a save that is cut off may leave
    them.
    """
    names = {f.name for f in found}
    return [
        f
        for f in found
        if not ((shard := _SHARD.fullmatch(f.name)) and f"{shard['name']}.safetensors" in names)
    ]


def _pickled(path: Path) -> WeightsError:
    rule = "weights are read from safetensors alone: a pickle can run any code"
    return WeightsError("weights", str(path), rule, "save it anew with safe_serialization=True")


def _places(path: Path) -> dict[str, Any]:
    """Map each tensor's name to its open file."""
    if path.suffix != ".json":
        file = _open(path)
        return dict.fromkeys(file.keys(), file)
    index = _index(path)
    files = {name: _open(path.parent / name) for name in sorted(set(index.values()))}
    held = {name: set(file.keys()) for name, file in files.items()}
    if lost := sorted(tensor for tensor, name in index.items() if tensor not in held[name]):
        rule = f"every tensor is in the file that {path.name} names; {len(lost)} are not"
        raise WeightsError("weights", lost[0], rule, "fetch the folder again")
    return {tensor: files[name] for tensor, name in index.items()}


def _index(path: Path) -> dict[str, str]:
    """Read which file each tensor is in."""
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        rule = f"an index is JSON, and whole ({error})"
        raise WeightsError("weights", str(path), rule, "fetch it again") from error
    where = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        rule = 'an index is {"weight_map": {tensor: file, ...}}'
        raise WeightsError(
            "weights", str(path), rule, "fetch it again, or name the .safetensors file itself"
        )
    return where


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise WeightsError(
            "weights", str(path), "the index names this file, and it is not there", "fetch it"
        )
    try:
        return safe_open(path, framework="numpy")
    except OSError as error:
        raise WeightsError(
            "weights", str(path), f"it must be readable ({error})", "allow reading it"
        ) from error
    except SafetensorError as error:
        raise WeightsError(
            "weights", str(path), f"a safetensors file must be whole ({error})", "fetch it again"
        ) from error


def save_tensors(
    forms: Mapping[str, Form],
    read: Callable[[str], np.ndarray],
    folder: str | Path,
    name: str = "diffusion_pytorch_model",
    shard_bytes: int = SHARD_BYTES,
) -> tuple[Path, ...]:
    """Write tensors as safetensors: one file, or several and their index, as diffusers does.

    Args:
        forms: shape and dtype of each tensor, by name: their bytes decide how many files there are.
        read: makes one tensor; one is held at a time.
        folder: made where it is missing. An earlier save of that name gives way: until all is
            written, it is what is read; then its index and files are removed, and nothing else.
        name: of the files.
        shard_bytes: the largest file, where no tensor is larger.

    Returns:
        The files, the index last where there is one.

    Raises:
        WeightsError: the folder cannot be written, or holds the index of a model of another name.
    """
    folder, shards = Path(folder), _shards(forms, shard_bytes)
    several = len(shards) > 1
    files = [
        f"{name}-{i + 1:05}-of-{len(shards):05}.safetensors" if several else f"{name}.safetensors"
        for i in range(len(shards))
    ]
    of_file = {
        file: {tensor: forms[tensor] for tensor in names}
        for file, names in zip(files, shards, strict=True)
    }
    writers = {file: partial(write, forms=some, read=read) for file, some in of_file.items()}
    where = {tensor: file for file, some in of_file.items() for tensor in some}
    index = {
        "metadata": {"total_size": sum(form.bytes for form in forms.values())},
        "weight_map": dict(sorted(where.items())),
    }
    swap_in(folder, name, writers, index if several else None)
    return (*(folder / file for file in files), *([folder / f"{name}{INDEX}"] if several else []))


def _shards(forms: Mapping[str, Form], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name, form in forms.items():
        if shards[-1] and held + form.bytes > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += form.bytes
    return shards
