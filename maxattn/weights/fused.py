"""Tensors that store the rows of several layers: split when loaded, joined when saved.

LoRA of several layers is joined as A = [A_1; A_2] and B = diag(B_1, B_2), which is exact:

    W_i' = W_i + B_i A_i  is  W' = [W_1; W_2] + B A,  A [rank, in], B [out, rank]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights.files import read_slice
from maxattn.weights.names import Entry, FusedPlace, entries

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class TensorRows:
    """Rows `start` to `stop` of a tensor, read on demand."""

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


SWAPPED: Final = "swapped halves"


class Shown(Mapping[str, Any]):
    """A state dict under other names; a name maps to a tensor, or to some rows of a tensor.

    Of rows that are `SWAPPED`, the tensor's second half is first.
    """

    def __init__(
        self, held: Mapping[str, Any], where: Mapping[str, tuple[str, slice | str | None]]
    ) -> None:
        self._held, self._where = held, where

    def __getitem__(self, name: str) -> Any:
        whole, rows = self._where[name]
        tensor = self._held[whole]
        if isinstance(rows, str):
            found = read_slice(self._held, whole, (slice(None),) * len(tensor.shape))
            return np.roll(found, len(found) // 2, axis=0)
        return tensor if rows is None else TensorRows(tensor, rows.start, rows.stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def unfused(held: Mapping[str, Any], wanted: Iterable[Entry]) -> Mapping[str, Any]:
    """Replace fused tensors by their layers; refuse a layer whose separate copy differs."""
    rows: dict[str, tuple[str, slice | None]] = {}
    wholes = set()
    for whole, parts in grouped((place, e) for e in wanted for place in e.fused).items():
        if whole not in held or not getattr(held[whole], "shape", ()):
            continue
        wholes.add(whole)
        start, length = 0, held[whole].shape[0]
        for entry in parts:
            # The last layer gets all remaining rows, so that a wrong number of rows is refused.
            stop = length if entry is parts[-1] else min(start + entry.shape[0], length)
            if entry.name in held:
                _check_copy(held, entry.name, whole, slice(start, stop))
            rows[entry.name] = whole, slice(start, stop)
            start = stop
    if not wholes:
        return held
    return Shown(held, rows | {name: (name, None) for name in held if name not in wholes})


def _check_copy(held: Mapping[str, Any], name: str, whole: str, rows: slice) -> None:
    """Refuse a layer that differs from its fused rows; diffusers' files may have both."""
    rest = (slice(None),) * (len(held[name].shape) - 1)
    own = read_slice(held, name, (slice(None), *rest))
    if own.tobytes() != read_slice(held, whole, (rows, *rest)).tobytes():
        rule = f"it must equal its rows in {whole}, which has other numbers"
        raise WeightsError("weights", name, rule, "remove the wrong one of the two")


def written(wanted: Iterable[Entry]) -> dict[str, list[Entry]]:
    """List the tensors to save, each with its layers in the order of their rows."""
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


def fuse_lora(
    module: nnx.Module, tensors: Mapping[str, np.ndarray], prefix: str = ""
) -> dict[str, np.ndarray]:
    """Join the LoRA weights of layers that diffusers stores in one tensor.

    Other weights do not change. The joined rank, which is also the default alpha, is the sum of the
    layers' ranks.

    Args:
        module: its classes name the layers to join in `diffusers_fused`.
        tensors: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, without alphas; `<layer>` is
            diffusers' name of a single layer.
        prefix: prefix of the names in `tensors`, such as "transformer.".

    >>> import numpy as np
    >>> class Both(nnx.Module):
    ...     diffusers_fused = {"to_kv": ("to_k", "to_v")}
    ...     def __init__(self):
    ...         self.to_k = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    ...         self.to_v = nnx.Linear(4, 2, rngs=nnx.Rngs(1))
    >>> pair = {"to_v.lora_A.weight": np.ones((1, 4)), "to_v.lora_B.weight": np.ones((2, 1))}
    >>> {name: x.shape for name, x in ma.weights.fuse_lora(Both(), pair).items()}
    {'to_kv.lora_A.weight': (1, 4), 'to_kv.lora_B.weight': (5, 1)}
    """
    found = dict(tensors)
    for name, parts in written(entries(module, prefix)).items():
        owns = [entry.owner for entry in parts]
        is_kernel = name.endswith(".weight")  # a layer owns its bias, too
        if is_kernel and len(parts) > 1 and any(own + _A in found for own in owns):
            pairs = [(found.pop(own + _A, None), found.pop(own + _B, None)) for own in owns]
            whole = name.removesuffix(".weight")
            found[whole + _A] = np.concatenate([a for a, _ in pairs if a is not None])
            found[whole + _B] = _diagonal([b for _, b in pairs], parts)
    return found


def _diagonal(ups: list[np.ndarray | None], parts: list[Entry]) -> np.ndarray:
    """Return the block-diagonal matrix of the layers' B; layers without LoRA add no columns."""
    there = [up for up in ups if up is not None]
    rows, ranks = sum(entry.shape[0] for entry in parts), sum(up.shape[1] for up in there)
    found, row, column = np.zeros((rows, ranks), there[0].dtype), 0, 0
    for up, entry in zip(ups, parts, strict=True):
        end = row + entry.shape[0]
        if up is not None:
            found[row:end, column : column + up.shape[1]] = up
            column += up.shape[1]
        row = end
    return found
