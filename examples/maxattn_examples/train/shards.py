"""Writes a folder of latents and conditions that latents.py reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn_examples.common.replacing import replacing
from maxattn_examples.common.shapes import Shapes

from .latents import EMPTY, LatentFolder

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
    """Write shards of at most `per_shard` examples; the folder takes its name when it is whole.

    Args:
        folder: where to; it must not be there yet.
        batches: some examples after others, of any number, with the names that latents.py lists.
        empty: negative_text (and negative_pooled), [1, ...]: what a dropped text is replaced by.
        model: what the latents are for, in the shards' metadata.
        source: where they are from; "digits" is drawn as digits.
        per_shard: examples of a shard.

    Raises:
        ConfigErrors: the folder is there, there are no examples, or they do not agree.
    """
    from safetensors.numpy import save_file

    folder = Path(folder)
    if folder.exists():
        remedy = "name another, or remove it"
        raise ConfigErrors([ConfigError("folder", folder, "it is made anew", remedy)])
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


def _shards(batches: Iterable[Batch], per_shard: int) -> Iterator[dict[str, np.ndarray]]:
    """Cut and join batches into shards of one size, the last one smaller."""
    examples = _examples(batches)
    while some := list(islice(examples, per_shard)):
        yield {name: np.stack([one[name] for one in some]) for name in some[0]}


def _examples(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the examples of batches, one at a time, without the batch axis."""
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
    """Return how the shapes of a batch differ from those of the first one."""
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in sorted(batch.items()))
    forms = (f"{name} [rows, {', '.join(map(str, s))}]" for name, s in sorted(first.items()))
    rule = "all examples have the same arrays, and in a file each array has a row for each example"
    remedy = f"give them as the first ones are: {', '.join(forms)}"
    return ConfigError("examples", shapes, rule, remedy)
