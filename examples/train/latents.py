"""A folder of precomputed latents and conditions, as a source of examples.

    latents-00000.safetensors ...    arrays of some examples each, the batch first
    empty.safetensors                negative_text (and negative_pooled): what a dropped text is
    replaced by

The arrays, by name: latents [B, C, F, h, w] or [B, C, h, w], as the model sees them; text [B, L,
D]; for SDXL pooled [B, P] and time_ids [B, 6]; for image-to-video image [B, S, D] and condition [B,
4 + C, F, h, w]. Every shard says in its metadata that its latents are scaled.
examples/make_latents.py writes such a folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError

NAMES = ("latents", "text", "pooled", "time_ids", "image", "condition")
EMPTY = "empty.safetensors"
MAKE = "make it anew with examples/make_latents.py"
FLOATS = ("F32", "F16", "BF16")


class LatentFolder:
    """Offer the examples of a folder, in the order of its files; only headers are read before an
    example is.

    It is a source for grain: `len(source)` and `source[index]`, a dict of arrays without a batch
    axis.

    Args:
        folder: where the shards are; None is refused as any other folder without them.

    Raises:
        ConfigErrors: no shard is there, one is broken, or they do not agree on names, shapes or
        dtypes.
    """

    def __init__(self, folder: str | None) -> None:
        if folder is None:
            raise ConfigErrors(
                [
                    _wrong(
                        "null", "training needs a folder of latents and texts", f"give one; {MAKE}"
                    )
                ]
            )
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigErrors(
                [
                    _wrong(
                        folder,
                        "it names a folder, and there is none",
                        "make it with examples/make_latents.py",
                    )
                ]
            )
        paths = sorted(self.folder.glob("latents-*.safetensors"))
        if not paths:
            raise ConfigErrors(
                [_wrong(folder, "it holds latents-*.safetensors, and there is none", MAKE)]
            )
        self._files = [_open(path) for path in paths]
        headers = [_header(file) for file in self._files]
        if problems := [
            p
            for path, file, h in zip(paths, self._files, headers, strict=True)
            for p in _problems(path, file, h, headers[0], paths[0].name)
        ]:
            raise ConfigErrors(problems)
        self._counts = [shape[0] for header in headers for shape, _ in [header["latents"]]]
        self._starts = np.concatenate([[0], np.cumsum(self._counts)])
        self.shapes = {name: shape[1:] for name, (shape, _) in headers[0].items()}
        said = self._files[0].metadata() or {}
        self.kind: str = said.get("source", "")
        self.model: str = said.get("model", "")
        self.note = (
            ""
            if self.says_empty
            else f"a text that is dropped is replaced by zeros: there is no {EMPTY}"
        )
        self._headers = headers

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[shard])
        file = self._files[shard]
        return {name: np.asarray(file.get_slice(name)[row : row + 1])[0] for name in self.shapes}

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """The conditions of the empty text, without a batch axis; zeros where the folder does not
        say them.
        """
        names = [name for name in ("text", "pooled") if name in self.shapes]
        said = self._said_empty()
        return {n: said.get(f"negative_{n}", np.zeros(self.shapes[n], np.float32)) for n in names}

    @property
    def says_empty(self) -> bool:
        """Whether the folder holds the conditions of the empty text."""
        return (self.folder / EMPTY).is_file()

    @property
    def fingerprint(self) -> str:
        """What tells this data from other data: names, shapes and dtypes of every shard, not where
        they are.
        """
        return hashlib.sha256(json.dumps(self._headers).encode()).hexdigest()[:16]

    def _said_empty(self) -> dict[str, np.ndarray]:
        if not self.says_empty:
            return {}
        file = _open(self.folder / EMPTY)
        found = {name: np.asarray(file.get_tensor(name))[0] for name in list(file.keys())}
        for name in ("text", "pooled"):
            if (
                name in self.shapes
                and found.get(f"negative_{name}", np.zeros(())).shape != self.shapes[name]
            ):
                rule = (
                    f"{EMPTY} holds negative_{name} [1, {', '.join(map(str, self.shapes[name]))}]"
                )
                raise ConfigErrors([_wrong(self.folder / EMPTY, rule, MAKE)])
        return found


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ConfigErrors([_wrong(path, f"a safetensors file is whole ({error})", MAKE)]) from None


def _header(file: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _problems(
    path: Path, file: Any, header: dict, first: dict, first_name: str
) -> Iterator[ConfigError]:
    """Yield what is wrong with one shard, by itself and beside the first."""
    if "latents" not in header:
        yield _wrong(
            path, "a shard holds latents, and this holds " + (", ".join(header) or "nothing"), MAKE
        )
        return
    if (file.metadata() or {}).get("scaled") != "true":
        yield _wrong(path, 'its metadata says scaled: "true": latents as the model sees them', MAKE)
    for name in sorted(header.keys() - set(NAMES)):
        yield _wrong(f"{path}: {name}", f"its arrays are among {', '.join(NAMES)}", "leave it out")
    for name, (shape, dtype) in header.items():
        if dtype not in FLOATS:
            yield _wrong(f"{path}: {name} is {dtype}", f"arrays are {', '.join(FLOATS)}", MAKE)
        if shape[:1] != header["latents"][0][:1]:
            rule = f"{name} has one row for each of the {header['latents'][0][0]} latents"
            yield _wrong(f"{path}: {name} {list(shape)}", rule, MAKE)
    if (here := _form(header)) != (there := _form(first)):
        name = next(n for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n))
        rule = f"all shards are alike; {first_name} has {_said(there.get(name))}"
        yield _wrong(f"{path}: {name} {_said(here.get(name))}", rule, MAKE)


def _form(header: dict) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (shape[1:], dtype) for name, (shape, dtype) in header.items()}


def _said(form: Any) -> str:
    return "not there" if form is None else f"{list(form[0])} {form[1]}"


def _wrong(value: object, rule: str, remedy: str) -> ConfigError:
    return ConfigError("data.folder", value, rule, remedy)
