"""Saves tensors as safetensors; a concurrent reader sees only the old save or only the new one.

Readers follow the index if there is one, so a save takes effect by one rename: of the index, or of
the single file if there is none. A file that an index names is not overwritten before the index is.
A second save into the folder waits for the first (replacing.py).

A file is eight bytes with the length of its header, a JSON header with dtype, shape and place of
each tensor, and the numbers, wider dtypes first so that all are aligned.
Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxattn.config.document import read_json
from maxattn.config.errors import printable
from maxattn.errors import WeightsError
from maxattn.weights.files import INDEX, NAMES
from maxattn.weights.replacing import PARTIAL, locked, own_ending

SHARD_BYTES = 5 * 2**30  # a larger tensor gets a separate file
METADATA = {"format": "pt"}  # diffusers refuses files without it
Read = Callable[[str], np.ndarray]


class Form(NamedTuple):
    """The shape of a tensor, and its dtype of numpy or ml_dtypes."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


def save_tensors(
    forms: Mapping[str, Form],
    read: Read,
    folder: str | Path,
    name: str = "diffusion_pytorch_model",
    shard_bytes: int = SHARD_BYTES,
) -> tuple[Path, ...]:
    """Write tensors as one file of safetensors, or as several and their index, as diffusers does.

    The sizes in `forms` set the number of files, whose names begin with `name`. Return the files,
    the index last if there is one.

    Args:
        forms: the shape and dtype of each tensor, by name.
        read: returns one tensor by name; only one at a time is in memory.
        folder, shard_bytes: as for `save_diffusers`.
    """
    folder, shards = Path(folder), _shards(forms, shard_bytes)
    files = [f"{name}-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [f"{name}.safetensors"]
    named = dict(zip(files, shards, strict=True))
    where = {tensor: file for file, some in named.items() for tensor in some}
    total = sum(form.bytes for form in forms.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    with _errors_of(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_another_index(folder, name)
        with locked(folder):
            there, ending = _named_by(folder / f"{name}{INDEX}"), own_ending()
            _write_beside(folder, named, read, ending)
            if len(files) == 1:
                (folder / f"{files[0]}{ending}").replace(folder / files[0])
                kept = files
            else:
                covered = not there.isdisjoint(files)
                _switch(folder / f"{name}{INDEX}", files, index, ending, covered=covered)
                kept = [*files, f"{name}{INDEX}"]
            _remove_earlier(folder, name, set(kept))
    return tuple(folder / file for file in kept)


def _shards(forms: Mapping[str, Form], most: int) -> list[dict[str, Form]]:
    shards: list[dict[str, Form]] = [{}]
    size = 0
    for name, form in forms.items():
        if shards[-1] and size + form.bytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = form
        size += form.bytes
    return shards


# ---- replacing an earlier save -------------------------------------------------------------------


@contextmanager
def _errors_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"it must be a writable folder, and the system reports: {reason}"
        remedy = "pass a folder with write permission and enough space"
        raise WeightsError("folder", printable(str(folder), 400), rule, remedy) from error


def _refuse_another_index(folder: Path, name: str) -> None:
    for other in sorted(folder.glob(f"*{INDEX}")):
        if other.name != f"{name}{INDEX}":
            rule = f"it must have no other model's index, and it has {other.name}"
            raise WeightsError("folder", str(folder), rule, "save to another folder")


def _named_by(index: Path) -> set[str]:
    """List the files that an index names; none for a missing or broken index."""
    try:
        return set(map(str, read_json(index)["weight_map"].values()))
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _write_beside(
    folder: Path, named: Mapping[str, Mapping[str, Form]], read: Read, ending: str
) -> None:
    try:
        for file, forms in named.items():
            write(folder / f"{file}{ending}", forms, read)
    except BaseException:
        for file in named:
            (folder / f"{file}{ending}").unlink(missing_ok=True)
        raise


def _switch(
    path: Path, files: list[str], index: Mapping[str, Any], ending: str, *, covered: bool
) -> None:
    """Rename files and index; a temporary index goes first if the old one is `covered`."""
    for_copies = own_ending()
    if covered:
        where = {tensor: f"{file}{ending}" for tensor, file in index["weight_map"].items()}
        _put_index(path, {**index, "weight_map": where})
    for file in files:
        new, name = path.with_name(f"{file}{ending}"), path.with_name(file)
        if not covered:
            new.replace(name)
            continue
        beside = path.with_name(f"{file}{for_copies}")
        try:
            os.link(new, beside)
        except OSError:  # a file system without hard links
            shutil.copyfile(new, beside)
        beside.replace(name)
    _put_index(path, index)


def _put_index(path: Path, index: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}{own_ending()}")
    try:
        beside.write_text(json.dumps(index, indent=2) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _remove_earlier(folder: Path, name: str, kept: set[str]) -> None:
    """Remove the files of earlier saves under `name` that are not in `kept`, the index first."""
    ours = re.compile(
        rf"{re.escape(name)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?"
        rf"(\.\d+-[0-9a-f]+{re.escape(PARTIAL)})?"
    )
    old = [
        f for f in folder.iterdir() if f.name not in kept and ours.fullmatch(f.name) and f.is_file()
    ]
    for file in sorted(old, key=lambda f: (f.suffix != ".json", f.name)):
        file.unlink()


# ---- one file ------------------------------------------------------------------------------------


def write(path: Path, forms: Mapping[str, Form], read: Read) -> None:
    """Write a safetensors file; `read` returns one tensor at a time, in its form."""
    names = sorted(forms, key=lambda name: (-np.dtype(forms[name].dtype).itemsize, name))
    head = _header(names, forms)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            tensor = np.asarray(read(name), order="C")
            if (tensor.shape, tensor.dtype) != (forms[name].shape, np.dtype(forms[name].dtype)):
                raise AssertionError(
                    f"{name} is {tensor.dtype}{tensor.shape}, and the header has {forms[name]}"
                )
            tensor.reshape(-1).view(np.uint8).tofile(file)


def _header(names: list[str], forms: Mapping[str, Form]) -> bytes:
    head: dict[str, Any] = {"__metadata__": METADATA}
    place = 0
    for name in names:
        shape, dtype = forms[name].shape, np.dtype(forms[name].dtype).name
        if dtype not in NAMES:
            rule = f"its dtype must be one of {', '.join(NAMES)}"
            raise WeightsError(name, dtype, rule, "cast the parameter")
        end = place + forms[name].bytes
        head[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(head, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
