"""Tensors of several layers, one after the other in their rows: split as they are read, and joined
as they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from maxattn.errors import WeightsError
from maxattn.weights.access import read_slice
from maxattn.weights.names import Entry


@dataclass(frozen=True)
class TensorRows:
    """Hold some rows of a tensor, unread.

    Args:
        tensor: the whole.
        start, stop: the rows.
    """

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


class Unfused(Mapping[str, Any]):
    """Show a state dict with the layers in the place of the tensors that hold several.

    Args:
        held: the state dict.
        rows: which tensor holds a layer, and in which rows.
    """

    def __init__(self, held: Mapping[str, Any], rows: Mapping[str, tuple[str, int, int]]) -> None:
        self._held, self._rows = held, rows
        whole = {name for name, _, _ in rows.values()}
        self._names = dict.fromkeys([n for n in held if n not in whole] + list(rows))

    def __getitem__(self, name: str) -> Any:
        """Return a tensor, or the rows of one."""
        if name not in self._rows or name in self._held:
            return self._held[name]
        whole, start, stop = self._rows[name]
        return TensorRows(self._held[whole], start, stop)

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._names)


def unfused(held: Mapping[str, Any], wanted: Iterable[Entry]) -> Mapping[str, Any]:
    """Show the layers of tensors that hold several; a state dict without such is itself.

    Raises:
        WeightsError: a layer is there by itself too, with other numbers.
    """
    rows: dict[str, tuple[str, int, int]] = {}
    for whole, parts in _groups(wanted).items():
        if whole not in held or not getattr(held[whole], "shape", ()):
            continue
        start, length = 0, held[whole].shape[0]
        for entry in parts:
            # What is too much is the last layer's, whose shape is then refused.
            stop = length if entry is parts[-1] else min(start + entry.shape[0], length)
            rows[entry.name] = (whole, start, stop)
            start = stop
    _check_copies(held, rows)
    return Unfused(held, rows) if rows else held


def _groups(wanted: Iterable[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, dict[int, Entry]] = {}
    for entry in wanted:
        for place in entry.fused:
            found.setdefault(place.name, {})[place.index] = entry
    return {name: [parts[i] for i in sorted(parts)] for name, parts in found.items()}


def _check_copies(held: Mapping[str, Any], rows: Mapping[str, tuple[str, int, int]]) -> None:
    """Refuse a layer that is there twice and differs; diffusers keeps both when it fuses them."""
    for name, (whole, start, stop) in rows.items():
        if name not in held:
            continue
        rest = (slice(None),) * (len(held[name].shape) - 1)
        one, other = (
            read_slice(held, where, (part, *rest))
            for where, part in ((name, slice(None)), (whole, slice(start, stop)))
        )
        if one.tobytes() != other.tobytes():
            rule = f"it stands in {whole} too, with other numbers"
            raise WeightsError("weights", name, rule, "keep the one that is meant")


def written(wanted: Iterable[Entry]) -> dict[str, list[Entry]]:
    """List the tensors to be written, each with its layers one after the other."""
    found: dict[str, dict[int, Entry]] = {}
    for entry in wanted:
        place = next((place for place in entry.fused if place.written), None)
        name, index = (entry.name, 0) if place is None else (place.name, place.index)
        found.setdefault(name, {})[index] = entry
    return {name: [parts[i] for i in sorted(parts)] for name, parts in found.items()}
