"""Reads safetensors slice by slice, from one file or from several files with an index."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from maxattn.config.document import read_json
from maxattn.config.errors import printable
from maxattn.errors import WeightsError

INDEX = ".safetensors.index.json"
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
DTYPES: dict[str, str] = {code: name for name, code in NAMES.items()} | {
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5}\.safetensors")
TRIES = 100  # how often a folder is opened while others save into it
WAIT = 0.02  # seconds after which an error must be the same as before
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafeTensors(Mapping[str, "SafeTensor"]):
    """The tensors of a safetensors file, or of a folder in diffusers' format, read on demand.

    Args:
        path: a .safetensors file, an .index.json, or a folder with one of them.

    Raises:
        WeightsError: a file is missing or broken, or the folder has only pickles.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._where = _places_of_one_save(self.path)

    def __getitem__(self, name: str) -> SafeTensor:
        return SafeTensor(self._where[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def headers(self) -> tuple[dict[str, str], ...]:
        """Return the metadata in the header of each file."""
        files = {id(file): file for file in self._where.values()}
        return tuple(file.opened.metadata() or {} for file in files.values())


class SafeTensor:
    """A tensor of a file, read slice by slice."""

    def __init__(self, file: OpenFile, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file.opened.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        self.dtype: str = DTYPES.get(self._slice.get_dtype()) or self._slice.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Read a slice, or the whole tensor for an empty index; refuse a file that changed."""
        self._file.check()
        found = self._slice[index] if index else self._file.opened.get_tensor(self._name)
        self._file.check()
        return found


class OpenFile:
    """An open file. A read is refused after the file was overwritten, not if it was removed."""

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, _open(path)
        self._inode, *self._stamp = _stamp(path)

    def check(self) -> None:
        """Refuse a file that was truncated or overwritten: reading it may crash the process."""
        inode, *stamp = _stamp(self.path)
        if inode == self._inode and stamp != self._stamp:
            rule = "a file must not change while it is read, and this one was written to"
            raise WeightsError("weights", str(self.path), rule, "load it again when it is complete")


def read_slice(held: Mapping[str, Any], name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Return a slice of a numpy, jax, safetensors or torch tensor as a numpy array."""
    try:
        piece = held[name][index]
        if hasattr(piece, "detach"):
            import ml_dtypes
            import torch  # type: ignore[import-not-found]

            piece = piece.detach().cpu().contiguous()
            if piece.dtype == torch.bfloat16:  # numpy lacks this dtype, so copy the bits
                return piece.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return np.asarray(piece)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # any error of the tensor's library
        message = printable(f"{type(error).__name__}: {error}", 200)
        rule = f"its numbers must be readable, and reading them failed with {message}"
        remedy = "pass readable arrays, or download the files again"
        raise WeightsError("tensors", name, rule, remedy) from error


# ---- the files of a path -------------------------------------------------------------------------


def _entry_file(path: Path) -> Path:
    """Return the path itself if it is a file, or the only index or file of a folder."""
    if os.path.isfile(path):
        if path.suffix in PICKLED:
            raise _pickled(path)
        return path
    is_folder = os.path.isdir(path)
    for pattern in (f"*{INDEX}", "*.safetensors"):
        found = _without_lone_shards(sorted(path.glob(pattern))) if is_folder else []
        if len(found) == 1:
            return found[0]
        if found:
            names = printable(", ".join(f.name for f in found), 400)
            rule = "a folder must have one .safetensors file, or one index"
            raise WeightsError(str(path), names, rule, "pass the path of one, or add the index")
    pickles = [f for f in path.glob("*") if f.suffix in PICKLED] if is_folder else []
    if pickles:
        raise _pickled(pickles[0])
    rule = f"it must be an existing .safetensors file, a *{INDEX}, or a folder with one"
    remedy = "pass the folder of the model's transformer or unet"
    raise WeightsError("weights", printable(str(path), 400), rule, remedy)


def _without_lone_shards(found: list[Path]) -> list[Path]:
    """Leave out shards that an interrupted save left beside the single file that replaces them."""
    shards = {f: shard["name"] for f in found if (shard := _SHARD.fullmatch(f.name))}
    names = {f.name for f in found}
    return [f for f in found if f not in shards or f"{shards[f]}.safetensors" not in names]


def _pickled(path: Path) -> WeightsError:
    rule = "weights must be safetensors, since loading a pickle can run any code"
    remedy = "save them with safe_serialization=True, or with safetensors.torch.save_file"
    return WeightsError("weights", str(path), rule, remedy)


def _places_of_one_save(path: Path) -> dict[str, OpenFile]:
    """Open a path's files; if a save replaced the index in the meantime, open them again."""
    last: tuple[Any, ...] = ()
    for tried in range(TRIES):
        time.sleep(tried / 1000)
        before: tuple[int, ...] = ()
        try:
            entry = _entry_file(path)
            before = _stamp(entry)
            found = _places(entry)
            if _stamp(entry) == before and _entry_file(path) == entry:
                return found
        except WeightsError as error:
            if (before, str(error)) == last:  # the same file and error twice: no save is under way
                raise
            last = before, str(error)
            time.sleep(WAIT)
    rule = "a folder must be read between two saves, and others save into it all the time"
    raise WeightsError("weights", printable(str(path), 400), rule, "wait for the other saves")


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a file's inode, and numbers that change with it or when it is written to."""
    try:
        found = path.stat()
    except OSError:  # removed
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def _places(path: Path) -> dict[str, OpenFile]:
    if path.suffix != ".json":
        file = OpenFile(path)
        return dict.fromkeys(file.opened.keys(), file)
    index = read_index(path)
    for name in sorted(set(index.values())):
        _check_inside(path, name)
    files = {name: OpenFile(path.parent / name) for name in sorted(set(index.values()))}
    held = {name: set(file.opened.keys()) for name, file in files.items()}
    if lost := sorted(tensor for tensor, name in index.items() if tensor not in held[name]):
        rule = f"each tensor must be in the file that {path.name} lists for it; {len(lost)} are not"
        raise WeightsError("weights", printable(lost[0], 400), rule, "download the folder again")
    return {tensor: files[name] for tensor, name in index.items()}


def _check_inside(index: Path, name: str) -> None:
    """Refuse a name that is outside of the index's folder on any operating system."""
    windows = PureWindowsPath(name)
    if windows.anchor or windows.drive or ".." in windows.parts or not windows.parts:
        rule = "an index must name files of its own folder, and this file is outside of it"
        remedy = "download the folder again, from a source that you trust"
        raise WeightsError("weights", f"{index}: {printable(name)}", rule, remedy)


def read_index(path: Path) -> dict[str, str]:
    """Read an index, which maps each tensor's name to the name of its file."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        rule = f"an index must be complete JSON, and {error}"
        raise WeightsError("weights", str(path), rule, "download it again") from error
    where = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        rule = 'an index must be {"weight_map": {tensor: file, ...}}'
        remedy = "download it again, or pass the path of the .safetensors file"
        raise WeightsError("weights", str(path), rule, remedy)
    return where


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    shown = printable(str(path), 400)
    if not os.path.isfile(path):
        rule = "every file of the index must exist, and this one does not"
        raise WeightsError("weights", shown, rule, "download it")
    try:
        return safe_open(path, framework="numpy")
    except OSError as error:
        rule = f"it must be readable ({error})"
        raise WeightsError("weights", shown, rule, "change its permissions") from error
    except SafetensorError as error:
        rule = f"a safetensors file must be complete ({printable(str(error), 400)})"
        raise WeightsError("weights", shown, rule, "download it again") from error
