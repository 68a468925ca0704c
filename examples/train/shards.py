"""Writes a folder of latents and conditions that latents.py reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError

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
        raise ConfigErrors(
            [ConfigError("folder", folder, "it is made anew", "name another, or remove it")]
        )
    beside = folder.with_name(f"{folder.name}.partial")
    beside.mkdir(parents=True, exist_ok=True)
    for left_over in beside.iterdir():
        left_over.unlink()
    metadata = {"model": model, "scaled": "true", "source": source}
    for number, shard in enumerate(_shards(batches, per_shard)):
        save_file(shard, beside / f"latents-{number:05}.safetensors", metadata=metadata)
    if empty:
        save_file(dict(empty), beside / EMPTY, metadata=metadata)
    LatentFolder(str(beside)).empty  # noqa: B018  (refuses what a run would refuse)
    beside.replace(folder)
    return LatentFolder(str(folder))


def _shards(batches: Iterable[Batch], per_shard: int) -> Iterable[dict[str, np.ndarray]]:
    """Cut and join batches into shards of one size, the last one smaller."""
    held: dict[str, list[np.ndarray]] = {}
    count = 0
    first: dict[str, tuple[int, ...]] | None = None
    for batch in batches:
        rows, form = (
            len(next(iter(batch.values()))),
            {name: array.shape[1:] for name, array in batch.items()},
        )
        first = first or form
        if form != first or any(len(array) != rows for array in batch.values()):
            shapes = ", ".join(
                f"{name} {list(array.shape)}" for name, array in sorted(batch.items())
            )
            rule = (
                "all examples have the same arrays, and in a file each array has a row for each"
                " example"
            )
            said = ", ".join(
                f"{name} [rows, {', '.join(map(str, shape))}]"
                for name, shape in sorted(first.items())
            )
            raise ConfigErrors(
                [ConfigError("examples", shapes, rule, f"give them as the first ones are: {said}")]
            )
        for start in range(rows):
            for name, array in batch.items():
                held.setdefault(name, []).append(array[start])
            count += 1
            if count == per_shard:
                yield {name: np.stack(arrays) for name, arrays in held.items()}
                held, count = {}, 0
    if count:
        yield {name: np.stack(arrays) for name, arrays in held.items()}
