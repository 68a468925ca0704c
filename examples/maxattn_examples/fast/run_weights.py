"""Which weights a run has, and whether what was measured before was measured on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PIECE, PIECES = 2**16, 8  # of a file of weights that its hash reads
KEYS = ("checkpoint", "checkpoint_2")  # of a pipeline's transformers, in files of measurements


class Apart(NamedTuple):
    """A key of a measurement that is not the run's.

    Args:
        key: its name.
        was: its value; None if the measurement does not say it.
        found: the run's; None if it has none.
        what: the part of the run that it is of, for messages.
    """

    key: str
    was: Any
    found: Any
    what: str


class RunWeights(NamedTuple):
    """The weights of a run: every transformer, and the LoRA weights that are merged.

    Args:
        parts: folder or file of each transformer, by its name in the pipeline, the first one first.
        lora: file of the LoRA weights of each, where there are some.
        scale: of the LoRA weights.
        names: file with names of their layers, where there is one.
    """

    parts: Mapping[str, Path]
    lora: Mapping[str, Path] = {}
    scale: float = 1.0
    names: Path | None = None

    def checkpoints(self) -> dict[str, str | None]:
        """Return the hash of each transformer by its key; None where no weights are there."""
        return dict(zip(KEYS, map(_hash, self.parts.values()), strict=False))

    def lora_said(self) -> list[str]:
        """Return what is merged, as files of measurements have it; empty if nothing is."""
        names = "" if self.names is None else f", names {_said(self.names)}"
        lora = self.lora.items()
        return [f"{part}: {_said(file)} x {self.scale:g}{names}" for part, file in lora]

    def apart(self, said: Mapping[str, Any]) -> Iterator[Apart]:
        """Yield the transformers that are not those of a measurement.

        Args:
            said: keys of its file. One that lacks `checkpoint_2` is of one transformer.
        """
        ours = self.checkpoints()
        for key, part in zip(KEYS, (*self.parts, "second transformer"), strict=False):
            if said.get(key) != ours.get(key) or (key in ours and ours[key] is None):
                yield Apart(key, said.get(key), ours.get(key), part)


def checkpoint_hash(path: Path) -> str:
    """Hash the weights of a folder or file: sizes of files, and bytes from places in each.

    Args:
        path: a folder with safetensors files, or one of them.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    found = sha256()
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for place in np.linspace(0, max(0, size - PIECE), PIECES).astype(int):
                opened.seek(int(place))
                found.update(opened.read(PIECE))
    return found.hexdigest()[:16]


def _said(path: Path) -> str:
    return _hash(path) or f"{path} is missing"


def _hash(path: Path) -> str | None:
    is_there = path.is_file() or any(path.glob("*.safetensors"))
    return checkpoint_hash(path) if is_there else None
