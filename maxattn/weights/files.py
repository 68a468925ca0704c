"""Reads safetensors slice by slice: one file, or a folder whose index spreads them over several."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np

from maxattn.config.errors import printable
from maxattn.config.plain_json import read_json
from maxattn.errors import WeightsError
from maxattn.weights.saves import NAMES

DTYPES: dict[str, str] = {code: name for name, code in NAMES.items()} | {
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_SHARD = re.compile(r"(?P<name>.+)-\d{5}-of-\d{5}\.safetensors")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class SafeTensors(Mapping[str, "SafeTensor"]):
    """The tensors of a safetensors file, or of a folder in diffusers' format, unread.

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
        return tuple(file.opened.metadata() or {} for file in files.values())


class SafeTensor:
    """One tensor of a file, read by slices."""

    def __init__(self, file: OpenFile, name: str) -> None:
        self._file, self._name = file, name
        self._slice = file.opened.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())
        self.dtype: str = DTYPES.get(self._slice.get_dtype()) or self._slice.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return a slice, or all of it for an empty index.

        Raises:
            WeightsError: the file has changed since it was opened.
        """
        self._file.check()
        found = self._slice[index] if index else self._file.opened.get_tensor(self._name)
        self._file.check()
        return found


class OpenFile:
    """An open file, refused once it was written to.

    One that is removed or replaced by a rename can still be read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, _open(path)
        self._inode, *self._stamp = self._state()

    def _state(self) -> tuple[int, int, int]:
        try:
            found = self.path.stat()
        except OSError:  # removed
            return 0, 0, 0
        return found.st_ino, found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Refuse a file that was cut or written over in place: a read may end the process."""
        inode, *stamp = self._state()
        if inode == self._inode and stamp != self._stamp:
            rule = "a file stays as it is while it is read, and this one was written to"
            raise WeightsError("weights", str(self.path), rule, "load it once it is whole")


# ---- which files ---------------------------------------------------------------------------------


def _entry_file(path: Path) -> Path:
    """Return the index or the one file that a path means."""
    if os.path.isfile(path):
        if path.suffix in PICKLED:
            raise _pickled(path)
        return path
    is_folder = os.path.isdir(path)
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = _without_lone_shards(sorted(path.glob(pattern))) if is_folder else []
        if len(found) == 1:
            return found[0]
        if found:
            names = printable(", ".join(f.name for f in found), 400)
            rule = "one file or one index says which tensors are meant"
            raise WeightsError(str(path), names, rule, "name one")
    pickles = [f for f in path.glob("*") if f.suffix in PICKLED] if is_folder else []
    if pickles:
        raise _pickled(pickles[0])
    rule = "it is a .safetensors file, or a folder that holds one or a .safetensors.index.json"
    remedy = "give the folder of the model's transformer or unet"
    raise WeightsError("weights", printable(str(path), 400), rule, remedy)


def _without_lone_shards(found: list[Path]) -> list[Path]:
    """Leave out shards beside the single file that replaced them, left by a save that was cut."""
    shards = {f: shard["name"] for f in found if (shard := _SHARD.fullmatch(f.name))}
    names = {f.name for f in found}
    return [f for f in found if f not in shards or f"{shards[f]}.safetensors" not in names]


def _pickled(path: Path) -> WeightsError:
    rule = "weights are read from safetensors alone: a pickle can run any code"
    remedy = "save it anew with safe_serialization=True, or with safetensors.torch.save_file"
    return WeightsError("weights", str(path), rule, remedy)


def _places(path: Path) -> dict[str, OpenFile]:
    """Return the open file of each tensor."""
    if path.suffix != ".json":
        file = OpenFile(path)
        return dict.fromkeys(file.opened.keys(), file)
    index = _index(path)
    for name in sorted(set(index.values())):
        _check_inside(path, name)
    files = {name: OpenFile(path.parent / name) for name in sorted(set(index.values()))}
    held = {name: set(file.opened.keys()) for name, file in files.items()}
    if lost := sorted(tensor for tensor, name in index.items() if tensor not in held[name]):
        rule = f"every tensor is in the file that {path.name} names; {len(lost)} are not"
        raise WeightsError("weights", printable(lost[0], 400), rule, "fetch the folder again")
    return {tensor: files[name] for tensor, name in index.items()}


def _check_inside(index: Path, name: str) -> None:
    """Refuse a name that leads out of the index's folder on any system."""
    windows = PureWindowsPath(name)
    if windows.anchor or windows.drive or ".." in windows.parts or not windows.parts:
        rule = "an index names files of its own folder, and this one leads out of it"
        remedy = "fetch the folder again, from where you trust it"
        raise WeightsError("weights", f"{index}: {printable(name)}", rule, remedy)


def _index(path: Path) -> dict[str, str]:
    try:
        said = read_json(path)
    except (OSError, ValueError) as error:
        rule = f"an index is JSON, and whole: {error}"
        raise WeightsError("weights", str(path), rule, "fetch it again") from error
    where = said.get("weight_map") if isinstance(said, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        rule = 'an index is {"weight_map": {tensor: file, ...}}'
        remedy = "fetch it again, or name the .safetensors file itself"
        raise WeightsError("weights", str(path), rule, remedy)
    return where


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    shown = printable(str(path), 400)
    if not os.path.isfile(path):
        rule = "the index names this file, and it is not there"
        raise WeightsError("weights", shown, rule, "fetch it")
    try:
        return safe_open(path, framework="numpy")
    except OSError as error:
        rule = f"it must be readable ({error})"
        raise WeightsError("weights", shown, rule, "allow reading it") from error
    except SafetensorError as error:
        rule = f"a safetensors file must be whole ({printable(str(error), 400)})"
        raise WeightsError("weights", shown, rule, "fetch it again") from error
