"""Examples: a folder of precomputed latents and conditions, and batches of any source.

    latents-00000.safetensors ...    arrays of some examples each, batch first
    empty.safetensors                negative_text (and negative_pooled): replaces a dropped text

The arrays, by name: scaled latents [B, C, F, h, w] or [B, C, h, w]; text [B, L, D]; for SDXL and
Flux.1 pooled [B, P]; for SDXL time_ids [B, 6]; for image-to-video image [B, S, D] and condition
[B, 4 + C, F, h, w]. The metadata of every shard state that its latents are scaled. `write` makes
such a folder, as examples/make_latents.py does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.weights.replacing import replacing
from maxattn_examples.common.hosts import Rows
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.sample.inputs import opened

if TYPE_CHECKING:
    import grain


NAMES = ("latents", "text", "pooled", "time_ids", "image", "condition")
EMPTY = "empty.safetensors"
MAKE = "make it anew with examples/make_latents.py"
FLOATS = ("F32", "F16", "BF16")
CONDITIONS = ("text", "pooled")  # those that the empty text has
NO_EMPTY = f"a text that is dropped is replaced by zeros: there is no {EMPTY}"
Header = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each array."""


class Shard(NamedTuple):
    """One file of a folder, with its header."""

    path: Path
    file: Any
    header: Header


class LatentFolder:
    """The examples of a folder, in the order of its files; only headers are read at first.

    A source for grain: `len(source)`, and `source[index]`, a dict of arrays without a batch axis.

    Args:
        folder: with the shards; None raises, as a folder without shards does.

    Raises:
        ConfigErrors: there is no shard, one is broken, or they differ in names, shapes or dtypes.
    """

    def __init__(self, folder: str | None) -> None:
        paths = _shard_paths(folder)
        self.folder = paths[0].parent
        self._files = [opened(path, "data.folder", MAKE) for path in paths]
        self._headers = [_header(file) for file in self._files]
        shards = list(map(Shard, paths, self._files, self._headers))
        if problems := [x for shard in shards for x in _shard_errors(shard, shards[0])]:
            raise ConfigErrors(problems)
        counts = [header["latents"][0][0] for header in self._headers]
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self.shapes = {name: shape[1:] for name, (shape, _) in self._headers[0].items()}
        metadata = self._files[0].metadata() or {}
        self.kind: str = metadata.get("source", "")
        self.model: str = metadata.get("model", "")
        self.note = "" if self.has_empty else NO_EMPTY

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
        """The conditions of the empty text, without a batch axis; zeros if the folder has none."""
        held = self._read_empty()
        names = [name for name in CONDITIONS if name in self.shapes]
        return {n: held.get(f"negative_{n}", np.zeros(self.shapes[n], np.float32)) for n in names}

    @property
    def has_empty(self) -> bool:
        """Whether the folder has the conditions of the empty text."""
        return (self.folder / EMPTY).is_file()

    @property
    def fingerprint(self) -> str:
        """A hash of the names, shapes and dtypes in every shard, but not of paths."""
        return hashlib.sha256(json.dumps(self._headers).encode()).hexdigest()[:16]

    def _read_empty(self) -> dict[str, np.ndarray]:
        if not self.has_empty:
            return {}
        file = opened(self.folder / EMPTY, "data.folder", MAKE)
        arrays = {name: np.asarray(file.get_tensor(name)) for name in list(file.keys())}
        held = {name: array[0] for name, array in arrays.items() if array.shape[:1] == (1,)}
        for name in (name for name in CONDITIONS if name in self.shapes):
            wanted = self.shapes[name]
            if held.get(f"negative_{name}", np.zeros(())).shape != wanted:
                rule = f"{EMPTY} contains negative_{name} [1, {', '.join(map(str, wanted))}]"
                raise ConfigErrors([_error(self.folder / EMPTY, rule, MAKE)])
        return held


def _shard_paths(folder: str | None) -> list[Path]:
    if folder is None:
        rule = "training needs a folder of latents and texts"
        raise ConfigErrors([_error("null", rule, f"give one; {MAKE}")])
    if not Path(folder).is_dir():
        rule = "the folder does not exist"
        remedy = "make it with examples/make_latents.py"
        raise ConfigErrors([_error(folder, rule, remedy)])
    if not (paths := sorted(Path(folder).glob("latents-*.safetensors"))):
        rule = "the folder has no latents-*.safetensors"
        raise ConfigErrors([_error(folder, rule, MAKE)])
    return paths


def _header(file: Any) -> Header:
    slices = {name: file.get_slice(name) for name in sorted(file.keys())}
    return {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def _shard_errors(shard: Shard, first: Shard) -> Iterator[ConfigError]:
    path, file, header = shard
    if bare := [name for name, (shape, _) in header.items() if not shape]:
        yield _error(f"{path}: {bare[0]}", "an array has a row for each latent", MAKE)
        return
    if "latents" not in header:
        rule = f"a shard contains latents, and this contains {', '.join(header) or 'nothing'}"
        yield _error(path, rule, MAKE)
        return
    if (file.metadata() or {}).get("scaled") != "true":
        rule = 'its metadata has scaled: "true", for latents scaled as the model takes them'
        yield _error(path, rule, MAKE)
    yield from _array_errors(path, header)
    if (here := _form(header)) != (there := _form(first.header)):
        name = next(n for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n))
        rule = f"all shards are alike; {first.path.name} has {_text(there.get(name))}"
        yield _error(f"{path}: {name} {_text(here.get(name))}", rule, MAKE)


def _array_errors(path: Path, header: Header) -> Iterator[ConfigError]:
    for name in sorted(header.keys() - set(NAMES)):
        yield _error(f"{path}: {name}", f"its arrays are among {', '.join(NAMES)}", "leave it out")
    rows = header["latents"][0][:1]
    for name, (shape, dtype) in header.items():
        if dtype not in FLOATS:
            yield _error(f"{path}: {name} is {dtype}", f"arrays are {', '.join(FLOATS)}", MAKE)
        if shape[:1] != rows:
            rule = f"{name} has one row for each of the {rows[0]} latents"
            yield _error(f"{path}: {name} {list(shape)}", rule, MAKE)


def _form(header: Header) -> Header:
    return {name: (shape[1:], dtype) for name, (shape, dtype) in header.items()}


def _text(form: tuple[tuple[int, ...], str] | None) -> str:
    return "not there" if form is None else f"{list(form[0])} {form[1]}"


def _error(value: object, rule: str, remedy: str) -> ConfigError:
    return ConfigError("data.folder", value, rule, remedy)


Batch = Mapping[str, np.ndarray]  # arrays of some examples by name, the batch first


def write(
    folder: str | Path,
    batches: Iterable[Batch],
    empty: Batch | None = None,
    *,
    model: str = "",
    source: str = "",
    per_shard: int = 64,
) -> LatentFolder:
    """Write shards of at most `per_shard` examples, atomically.

    Args:
        folder: must not exist.
        batches: batches of any size, with the array names above.
        empty: negative_text (and negative_pooled), [1, ...], which replaces a dropped text.
        model: the latents' model, for the shards' metadata.
        source: the latents' origin; pictures of "digits" are drawn as digits.

    Raises:
        ConfigErrors: the folder exists, there are no examples, or they have different shapes.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    if folder.exists():
        remedy = "name another, or remove it"
        raise ConfigErrors([ConfigError("folder", folder, "the folder exists", remedy)])
    folder.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"model": model, "scaled": "true", "source": source}
    with replacing(folder) as partial:
        partial.mkdir()
        for number, shard in enumerate(_shards(batches, per_shard)):
            save_file(shard, partial / f"latents-{number:05}.safetensors", metadata=metadata)
        if empty:
            save_file(dict(empty), partial / EMPTY, metadata=metadata)
        _ = LatentFolder(str(partial)).empty  # a run would refuse the same
    return LatentFolder(str(folder))


def read_batches(files: Iterable[str], setting: str) -> Iterator[Batch]:
    """Read safetensors files one after another, each a batch.

    Raises:
        ConfigErrors: a file is damaged; `setting` names it.
    """
    for path in files:
        file = opened(Path(path), setting, "name the right files")
        yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _shards(batches: Iterable[Batch], per_shard: int) -> Iterator[dict[str, np.ndarray]]:
    """Cut and join batches into shards of equal size; the last may be smaller."""
    examples = _examples(batches)
    while some := list(islice(examples, per_shard)):
        yield {name: np.stack([one[name] for one in some]) for name in some[0]}


def _examples(batches: Iterable[Batch]) -> Iterator[Batch]:
    first: Shapes = {}
    for batch in batches:
        first = first or _shapes(batch)
        rows = len(next(iter(batch.values())))
        if _shapes(batch) != first or any(len(array) != rows for array in batch.values()):
            raise ConfigErrors([_unlike(batch, first)])
        for row in range(rows):
            yield {name: array[row] for name, array in batch.items()}


def _shapes(batch: Batch) -> Shapes:
    return {name: array.shape[1:] for name, array in batch.items()}


def _unlike(batch: Batch, first: Shapes) -> ConfigError:
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in sorted(batch.items()))
    forms = (f"{name} [rows, {', '.join(map(str, s))}]" for name, s in sorted(first.items()))
    rule = "all examples have the same arrays, and in a file each array has a row for each example"
    remedy = f"give them as the first ones are: {', '.join(forms)}"
    return ConfigError("examples", shapes, rule, remedy)


# ---- batches in a seeded order -------------------------------------------------------------------
# Each batch is a function of its index and the seed alone, so a run resumes from one number.


class Source(Protocol):
    """Examples by index: dicts of arrays without a batch axis."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, np.ndarray]: ...


class Counted:
    """Batches of an endless source, whose examples are never repeated.

    Args:
        source: makes each example from its number.
    """

    def __init__(self, source: Source, batch_size: int, rows: Rows) -> None:
        self._batches, self._next = Batches(source, batch_size, rows), 0

    def __next__(self) -> dict[str, np.ndarray]:
        self._next += 1
        return self._batches[self._next - 1]

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        self._next = state["next"]


class Batches:
    """Iterate over the batches of a run, with the batch rows that this process loads.

    Args:
        examples: in the order of training.
    """

    def __init__(self, examples: Any, batch_size: int, rows: Rows) -> None:
        self._examples, self._size, self._rows = examples, batch_size, rows

    def __len__(self) -> int:
        return len(self._examples) // self._size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        first = int(index) * self._size
        found: list[Any] = [self._examples[first + int(row)] for row in self._rows]
        return {key: np.stack([one[key] for one in found]) for key in found[0]}


def batches(
    source: Source, batch_size: int, seed: int, rows: Rows | None = None
) -> grain.DatasetIterator | Counted:
    """Batch examples without end; shuffle them in each epoch.

    Args:
        source: the examples; those of an `endless` source come in the order of their numbers.
        rows: the batch rows to load; default all.

    Returns:
        An iterator over dicts of arrays; `get_state()` gives its position, equal on every process.
    """
    rows = np.arange(batch_size) if rows is None else rows
    if getattr(source, "endless", False):
        return Counted(source, batch_size, rows)
    import grain  # sampling, which reads this file too, does without it

    whole: Any = source
    examples = grain.MapDataset.source(whole).seed(seed).shuffle().repeat()
    wanted: Any = Batches(examples, batch_size, rows)
    dataset = grain.MapDataset.source(wanted)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
