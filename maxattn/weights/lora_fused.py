"""LoRA of tensors that hold several layers: split as it is read, joined as it is written.

    whole  W' = [W_1; W_2] + B A        read as  W_1' = W_1 + B_1 A,  W_2' = W_2 + B_2 A
    parts  W_i' = W_i + B_i A_i         written as  A = [A_1; A_2],  B = diag(B_1, B_2)

A [rank, in], B [out, rank]. Both are exact: the rows of B that a layer has are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights.fused import TensorRows, written
from maxattn.weights.lora_names import layer_of
from maxattn.weights.names import Entry, entries
from maxattn.weights.naming.module_names import ModuleNames

A_END, B_END = ".lora_A.weight", ".lora_B.weight"
BY_ROW: Final = ("lora_B", "lora.up", "lora_up", "diff", "diff_b")
"""How what has a row for each channel of the output begins, behind the layer's name."""


class SplitLora(Mapping[str, Any]):
    """Show LoRA weights with the layers in the place of the tensors that hold several.

    Args:
        held: the weights.
        prefix: of the names that are for the module.
        module: its names.

    Attributes:
        written: the layer's name as the file has it, for each layer that was split.

    Raises:
        WeightsError: rows that are not those of the layers, or a layer that is there twice.
    """

    def __init__(self, held: Mapping[str, Any], prefix: str, module: ModuleNames) -> None:
        self._held = held
        self._parts: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        whole = set()
        for name in held if module.fused else ():
            layer = layer_of(name.removeprefix(prefix)) if name.startswith(prefix) else None
            meant = module.layers.get(layer or "")
            if layer is not None and meant is not None and meant in module.fused:
                whole.add(name)
                self._split(name, layer, prefix, module.fused[meant])
        self._names = dict.fromkeys([n for n in held if n not in whole] + list(self._parts))

    def _split(self, name: str, layer: str, prefix: str, parts: tuple[Entry, ...]) -> None:
        end, tensor = name.removeprefix(prefix + layer), self._held[name]
        by_row, start = end.lstrip(".").startswith(BY_ROW), 0
        if by_row:
            _check_rows(name, tensor, parts)
        for entry in parts:
            own = entry.name.removesuffix(".weight")
            new = f"{prefix}{own}{end}"
            if new in self._held or new in self._parts:
                rule = f"each layer has one pair of matrices, and {name} is for {own} too"
                raise WeightsError("LoRA", new, rule, "keep the one that is meant")
            stop = start + entry.shape[0]
            self._parts[new] = TensorRows(tensor, start, stop) if by_row else tensor
            self.written[own], start = layer, stop

    def __getitem__(self, name: str) -> Any:
        """Return a tensor, or the rows of one."""
        return self._parts[name] if name in self._parts else self._held[name]

    def __iter__(self) -> Iterator[str]:
        """List the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the names."""
        return len(self._names)


def _check_rows(name: str, tensor: Any, parts: tuple[Entry, ...]) -> None:
    total, shape = sum(entry.shape[0] for entry in parts), tuple(tensor.shape)
    if shape[:1] != (total,):
        layers = ", ".join(entry.name.removesuffix(".weight") for entry in parts)
        rule = f"it has the {total} rows of {layers}"
        raise WeightsError("LoRA", f"{name}: {shape}", rule, "give LoRA weights of this model")


def fuse_lora(
    module: nnx.Module, tensors: Mapping[str, np.ndarray], prefix: str = ""
) -> dict[str, np.ndarray]:
    """Join the LoRA weights of layers that diffusers keeps in one tensor; others stay as they are.

    The rank of what is joined is the sum of the ranks, and so is the alpha that readers assume.

    Args:
        module: whose classes say in `diffusers_fused` which layers these are.
        tensors: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, by diffusers' names of the
            layers by themselves, without alphas.
        prefix: of these names, such as "transformer.".

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
        owns = [entry.name.removesuffix(".weight") for entry in parts]
        if len(parts) > 1 and any(own + A_END in found for own in owns):
            pairs = [(found.pop(own + A_END, None), found.pop(own + B_END, None)) for own in owns]
            whole = name.removesuffix(".weight")
            found[whole + A_END] = np.concatenate([a for a, _ in pairs if a is not None])
            found[whole + B_END] = _diagonal([b for _, b in pairs], parts)
    return found


def _diagonal(ups: list[np.ndarray | None], parts: list[Entry]) -> np.ndarray:
    """Put the rows of each layer where they belong, zeros elsewhere."""
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
