"""Tensors that hold the rows of several layers: split as they are read, joined as they are
written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxattn.errors import WeightsError
from maxattn.weights.access import read_slice
from maxattn.weights.names import Entry, FusedPlace


@dataclass(frozen=True)
class TensorRows:
    """Rows `start` to `stop` of a tensor, unread."""

    tensor: Any
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of these rows."""
        return (max(self.stop - self.start, 0), *self.tensor.shape[1:])

    @property
    def dtype(self) -> Any:
        """Return the dtype of the tensor."""
        return self.tensor.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        """Read a part of these rows."""
        start, stop, _ = index[0].indices(self.shape[0])
        return self.tensor[(slice(self.start + start, self.start + stop), *index[1:])]


class Shown(Mapping[str, Any]):
    """A state dict under other names, unread.

    Args:
        held: the state dict.
        where: the tensor of each name, and its rows; None for the whole.
    """

    def __init__(
        self, held: Mapping[str, Any], where: Mapping[str, tuple[str, slice | None]]
    ) -> None:
        self._held, self._where = held, where

    def __getitem__(self, name: str) -> Any:
        whole, rows = self._where[name]
        tensor = self._held[whole]
        return tensor if rows is None else TensorRows(tensor, rows.start, rows.stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def unfused(held: Mapping[str, Any], wanted: Iterable[Entry]) -> Mapping[str, Any]:
    """Show layers in the place of the tensors that hold several.

    Raises:
        WeightsError: a layer has a tensor of its own too, with other numbers.
    """
    rows: dict[str, tuple[str, slice | None]] = {}
    wholes = set()
    for whole, parts in grouped((place, e) for e in wanted for place in e.fused).items():
        if whole not in held or not getattr(held[whole], "shape", ()):
            continue
        wholes.add(whole)
        start, length = 0, held[whole].shape[0]
        for entry in parts:
            # The last layer gets all rows that are left, so that a wrong number of them is refused.
            stop = length if entry is parts[-1] else min(start + entry.shape[0], length)
            if entry.name in held:
                _check_copy(held, entry.name, whole, slice(start, stop))
            rows[entry.name] = whole, slice(start, stop)
            start = stop
    if not wholes:
        return held
    return Shown(held, rows | {name: (name, None) for name in held if name not in wholes})


def _check_copy(held: Mapping[str, Any], name: str, whole: str, rows: slice) -> None:
    """Refuse a layer that differs from its rows; diffusers keeps both when it fuses layers."""
    rest = (slice(None),) * (len(held[name].shape) - 1)
    own = read_slice(held, name, (slice(None), *rest))
    if own.tobytes() != read_slice(held, whole, (rows, *rest)).tobytes():
        rule = f"it stands in {whole} too, with other numbers"
        raise WeightsError("weights", name, rule, "keep the one that is meant")


def written(wanted: Iterable[Entry]) -> dict[str, list[Entry]]:
    """List the tensors to be written, each with its layers in the order of their rows."""
    return grouped(
        (next((p for p in entry.fused if p.written), FusedPlace(entry.name, 0, True)), entry)
        for entry in wanted
    )


def grouped(placed: Iterable[tuple[FusedPlace, Entry]]) -> dict[str, list[Entry]]:
    """Return the layers of each tensor, in the order of their rows."""
    found: dict[str, dict[int, Entry]] = {}
    for place, entry in placed:
        found.setdefault(place.name, {})[place.index] = entry
    return {name: [parts[i] for i in sorted(parts)] for name, parts in found.items()}
