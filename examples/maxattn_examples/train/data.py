"""Batches in a seeded order.

Each batch is a function of its index and the seed alone, so a run resumes from one number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from maxattn_examples.common.hosts import Rows

if TYPE_CHECKING:
    import grain


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
