"""All names that a file may have for the layers of a module: its own, those of other codes, and
both with underscores for dots, as kohya's sd-scripts write them. No name is split at underscores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flax import nnx

from maxattn.weights.access import variable_at
from maxattn.weights.fused import grouped
from maxattn.weights.names import Entry, entries
from maxattn.weights.naming import sgm, wan

FAMILIES: Final = (wan.originals, sgm.originals)


@dataclass(frozen=True)
class ModuleNames:
    """A module's parameters, and every name of its layers.

    Args:
        entries: its parameters, by diffusers' names.
        kernels: those of its Linear and Conv layers, by the names of the layers.
        layers: diffusers' name of a layer, by each name that it may have.
        fused: the kernels, in order, of a layer that diffusers has for several.
    """

    entries: Mapping[str, Entry]
    kernels: Mapping[str, Entry]
    layers: Mapping[str, str]
    fused: Mapping[str, tuple[Entry, ...]]

    def parameter(self, layer: str, end: str) -> Entry | None:
        """Return a parameter of a layer; a weight may have the layer's name alone."""
        found = self.entries.get(f"{layer}.{end}")
        return self.entries.get(layer) if found is None and end == "weight" else found


def names_of(module: nnx.Module) -> ModuleNames:
    """List the names of a module's parameters and layers.

    Args:
        module: with arrays or, from `nnx.eval_shape`, without.
    """
    every = {entry.name: entry for entry in entries(module)}
    kernels = {n.removesuffix(".weight"): e for n, e in every.items() if _is_kernel(module, e)}
    whole = grouped((place, entry) for entry in kernels.values() for place in entry.fused)
    fused = {_layer(name): tuple(parts) for name, parts in whole.items() if len(parts) > 1}
    layers = {_layer(name): None for name in every} | dict.fromkeys(fused)
    return ModuleNames(every, kernels, _all_names(list(layers)), fused)


def _layer(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias")


def _is_kernel(module: nnx.Module, entry: Entry) -> bool:
    """Whether it is [out, in] or [out, in, *window], of one group."""
    if entry.axes[-2:] != (1, 0) or not entry.name.endswith(".weight"):
        return False
    owner: Any = variable_at(module, entry.path[:-1])
    return getattr(owner, "feature_group_count", 1) == 1


def _all_names(layers: list[str]) -> dict[str, str]:
    """Map every name to its layer, but for names that two layers would have."""
    own = {layer: layer for layer in layers}
    dotted = [pair for family in FAMILIES for pair in family(layers).items()] + [*own.items()]
    meant: dict[str, set[str]] = {}
    for layer, name in dotted:
        for written in (name, name.replace(".", "_")):
            meant.setdefault(written, set()).add(layer)
    return {name: min(those) for name, those in meant.items() if len(those) == 1} | own
