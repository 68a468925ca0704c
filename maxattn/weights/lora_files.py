"""Reads LoRA weights and checks them against a module; nothing is merged here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.access import dtype_name, read_slice
from maxattn.weights.checks import LISTED
from maxattn.weights.lora_change import Change, Difference, LowRank
from maxattn.weights.lora_fused import split_lora
from maxattn.weights.lora_names import (
    DIFFERENCES,
    LoraLayer,
    find_prefix,
    layers_of,
    log_part,
    remedy,
)
from maxattn.weights.lora_settings import read_strength
from maxattn.weights.names import Entry
from maxattn.weights.naming.module_names import ModuleNames, names_of

log = logging.getLogger("maxattn")
_INTEGER = re.compile(r"u?int(8|16|32|64)")
_OTHER_MODEL = "give LoRA weights of this model"


class Lora(NamedTuple):
    """LoRA weights that fit a module.

    Args:
        held: the tensors, by name.
        module: the module's names.
        layers: the tensors of each layer, by diffusers' names.
        factors: of each layer's `B A`, before the caller's scale.
    """

    held: Mapping[str, Any]
    module: ModuleNames
    layers: Mapping[str, LoraLayer]
    factors: Mapping[str, float]

    def changes(self, scale: float) -> list[tuple[Entry, Change]]:
        """Read what is added to each parameter."""
        found: list[tuple[Entry, Change]] = []
        for layer, factor in self.factors.items():
            its = self.layers[layer].tensors
            down, up = (_whole(self.held, its[kind]) for kind in ("down", "up"))
            down, up = down.reshape(len(down), -1), up.reshape(len(up), -1)
            found.append((self.module.kernels[layer], LowRank(down, up, scale * factor)))
        for name, entry in _differences(self.layers, self.module):
            found.append((entry, Difference(_whole(self.held, name), scale)))
        return found


def read_lora(
    module: nnx.Module, tensors: Mapping[str, Any] | str | Path, prefix: str | None, strict: bool
) -> Lora:
    """Read LoRA weights and check all but their sums with the kernels.

    Args:
        module, tensors, prefix, strict: as for `merge_lora`.

    Raises:
        WeightsError: as `merge_lora` would, but for sums.
    """
    known, held = names_of(module), checks.tensors(tensors)
    if prefix is None:
        prefix = find_prefix(held, known)
        log_part(prefix, held)
    checks.prefix(prefix)
    strength = read_strength(held, prefix)
    held, split = split_lora(held, prefix, known)
    names = [name for name in held if name.startswith(prefix)]
    layers, unknown = layers_of(names, prefix, known)
    checks.arrays(names, held)
    if unknown or not layers:
        few = bool(layers) or len(unknown) == 1
        help_ = remedy(unknown, prefix, list(held), known, few) if unknown else ""
        _refuse_unknown(unknown, len(layers), strict, help_)

    pairs = {layer: its.tensors for layer, its in layers.items() if "down" in its.tensors}
    for layer, its in pairs.items():
        _check_pair(layer, its["down"], its["up"], known.kernels[layer], held)
    for name, entry in _differences(layers, known):
        _check_difference(name, entry, held)
    used = (its.tensors.items() for its in layers.values())
    checks.dtypes([name for its in used for kind, name in its if kind != "alpha"], held)

    factors = {}
    for layer, its in pairs.items():
        rank = held[its["down"]].shape[0]
        # A layer's own alpha is for the rank itself, whatever the metadata say of its root; these
        # name layers as the file does.
        own = _checked_alpha(its["alpha"], held) / rank if "alpha" in its else None
        as_written = split.get(layer, layers[layer].written)
        factors[layer] = strength.of(as_written, rank) if own is None else own
    return Lora(held, known, layers, factors)


def _whole(held: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a tensor on the host in float32."""
    with np.errstate(over="ignore"):
        return read_slice(held, name, (slice(None),) * len(held[name].shape)).astype(np.float32)


def _differences(
    layers: Mapping[str, LoraLayer], module: ModuleNames
) -> Iterator[tuple[str, Entry]]:
    """List the tensors that are added as they are, each with its parameter."""
    for layer, (_, tensors) in layers.items():
        for kind, end in DIFFERENCES.items():
            entry = module.parameter(layer, end)
            if kind in tensors and entry is not None:
                yield tensors[kind], entry


# ---- checks --------------------------------------------------------------------------------------


def _refuse_unknown(unknown: list[str], known: int, strict: bool, remedy: str) -> None:
    """Refuse layers that the module lacks, or log that they are left out."""
    count = len(unknown) + known
    if not count:
        rule = "it holds <layer>.lora_A.weight and <layer>.lora_B.weight"
        raise WeightsError("LoRA", "no weights", rule, "give the right file, or the right prefix")
    more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
    listed = ", ".join(unknown[:LISTED]) + more
    if strict or not known:
        not_there = f"{len(unknown)} of {count} are not"
        rule = f"each name is a Linear or Conv layer of the module, and {not_there}"
        raise WeightsError("LoRA", listed, rule, remedy)
    log.warning("LoRA: %d of %d layers are left out: %s", len(unknown), count, listed)


def _check_pair(layer: str, down: str, up: str, entry: Entry, held: Mapping[str, Any]) -> None:
    a, b = tuple(held[down].shape), tuple(held[up].shape)
    shapes, (out_size, *inner) = f"{layer}: {a} and {b}", entry.shape
    if a[:1] == (0,) or b[1:] == (0,):
        rule = "the rank is at least 1: with none, nothing changes"
        raise WeightsError("LoRA", shapes, rule, "leave this layer out")
    rank = a[0] if a else 0
    if _trimmed(a) != _trimmed((rank, *inner)) or _trimmed(b) != (out_size, rank):
        ones = ", 1" * (len(inner) - 1)
        rule = f"lora_A is [rank, {', '.join(map(str, inner))}] and lora_B [{out_size}, rank{ones}]"
        raise WeightsError("LoRA", shapes, rule, _OTHER_MODEL)
    _check_finite(down, held)
    _check_finite(up, held)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the axes of 1 at the end: a window of one pixel is none."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _check_difference(name: str, entry: Entry, held: Mapping[str, Any]) -> None:
    if _trimmed(shape := tuple(held[name].shape)) != _trimmed(entry.shape):
        rule = f"a difference has the shape of {entry.name}, {entry.shape}"
        raise WeightsError("LoRA", f"{name}: {shape}", rule, _OTHER_MODEL)
    _check_finite(name, held)


def _check_finite(name: str, held: Mapping[str, Any]) -> None:
    if not np.isfinite(_whole(held, name)).all():
        remedy = "fetch the file again, or train with less"
        raise WeightsError("LoRA", name, "its numbers are finite", remedy)


def _checked_alpha(name: str, held: Mapping[str, Any]) -> float:
    shape, dtype = tuple(held[name].shape), dtype_name(held[name].dtype)
    if prod(shape) != 1:
        wrong, rule = f"shape {shape}", "an alpha is one number"
    elif not (checks.is_floating(dtype) or _INTEGER.fullmatch(dtype)):
        wrong, rule = dtype, "an alpha is a number of 16 bits or more, or a whole one"
    elif not isfinite(alpha := float(_whole(held, name).reshape(()))):
        wrong, rule = str(alpha), "an alpha is a finite number"
    else:
        return alpha
    remedy = "leave it out where it is the rank, or fetch the file again"
    raise WeightsError("LoRA", f"{name}: {wrong}", rule, remedy)
