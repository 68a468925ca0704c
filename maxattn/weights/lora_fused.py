"""LoRA of tensors that hold several layers: split as it is read, joined as it is written.

    whole  W' = [W_1; W_2] + B A        read as  W_1' = W_1 + B_1 A,  W_2' = W_2 + B_2 A
    parts  W_i' = W_i + B_i A_i         written as  A = [A_1; A_2],  B = diag(B_1, B_2)

A [rank, in], B [out, rank]. Both are exact: a layer has its own rows of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights.fused import Shown, written
from maxattn.weights.lora_names import layer_of
from maxattn.weights.names import Entry, entries
from maxattn.weights.naming.module_names import ModuleNames

A_END, B_END = ".lora_A.weight", ".lora_B.weight"
BY_ROW: Final = (".lora_B", ".lora.up", ".lora_up", ".diff", ".diff_b")
"""Ends of the names of tensors with a row for each channel of the output."""


def split_lora(
    held: Mapping[str, Any], prefix: str, module: ModuleNames
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Show layers in the place of the tensors that hold several.

    Args:
        held: LoRA weights.
        prefix: of the names that are for the module.
        module: its names.

    Returns:
        The weights, and for each layer that was split the layer's name in the file.

    Raises:
        WeightsError: the rows are not those of the layers, or a layer is there twice.
    """
    where: dict[str, tuple[str, slice | None]] = {}
    written_as: dict[str, str] = {}
    for name in held if module.fused else ():
        bare = name.removeprefix(prefix)
        layer = (layer_of(bare) if name.startswith(prefix) else None) or ""
        parts = module.fused.get(module.layers.get(layer, ""), ())
        if not parts:
            where[name] = name, None
            continue
        end, start = bare.removeprefix(layer), 0
        by_row = end.startswith(BY_ROW)
        if by_row:
            _check_rows(name, tuple(held[name].shape), parts)
        for entry in parts:
            own = entry.name.removesuffix(".weight")
            new, stop = f"{prefix}{own}{end}", start + entry.shape[0]
            if new in held or new in where:
                rule = f"each layer has one pair of matrices, and {name} is for {own} too"
                raise WeightsError("LoRA", new, rule, "keep the one that is meant")
            where[new] = name, slice(start, stop) if by_row else None
            written_as[own], start = layer, stop
    return (Shown(held, where) if written_as else held), written_as


def _check_rows(name: str, shape: tuple[int, ...], parts: tuple[Entry, ...]) -> None:
    total = sum(entry.shape[0] for entry in parts)
    if shape[:1] != (total,):
        layers = ", ".join(entry.name.removesuffix(".weight") for entry in parts)
        rule = f"it has the {total} rows of {layers}"
        raise WeightsError("LoRA", f"{name}: {shape}", rule, "give LoRA weights of this model")


def fuse_lora(
    module: nnx.Module, tensors: Mapping[str, np.ndarray], prefix: str = ""
) -> dict[str, np.ndarray]:
    """Join the LoRA weights of layers that diffusers keeps in one tensor; others stay as they are.

    The joined rank is the sum of the ranks, and so is the alpha that readers assume.

    Args:
        module: whose classes name these layers in `diffusers_fused`.
        tensors: `<layer>.lora_A.weight` and `<layer>.lora_B.weight`, by diffusers' names of the
            single layers, without alphas.
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
    """Put each layer's B at its rows and at columns of its own, and zeros elsewhere."""
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
