"""Reads LoRA weights and checks them against a module; nothing is merged here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights import checks, lora_prefix
from maxattn.weights.access import dtype_name, read_slice
from maxattn.weights.checks import LISTED
from maxattn.weights.lora_alphas import Strength, strength
from maxattn.weights.lora_change import Change, Difference, LowRank
from maxattn.weights.lora_fused import SplitLora
from maxattn.weights.lora_names import DIFFERENCES, LoraNames, LoraPair, named
from maxattn.weights.names import Entry
from maxattn.weights.naming.module_names import ModuleNames, names_of

log = logging.getLogger("maxattn")
_INTEGER = re.compile(r"u?int(8|16|32|64)")
_OTHER_MODEL = "give LoRA weights of this model"


class Lora(NamedTuple):
    """Hold LoRA weights that fit a module.

    Args:
        tensors: by name.
        module: its names.
        names: which tensors are for which layers.
        factors: what each layer's product is multiplied by, before the caller's scale.
    """

    tensors: Mapping[str, Any]
    module: ModuleNames
    names: LoraNames
    factors: dict[str, float]

    def layers(self) -> tuple[str, ...]:
        """Return the layers that are changed, under diffusers' names."""
        return tuple(self.names.written)

    def changes(self, scale: float) -> list[tuple[Entry, Change]]:
        """Read what is added to each parameter."""
        found: list[tuple[Entry, Change]] = []
        for layer, pair in self.names.pairs.items():
            down, up = (_matrix(_whole(self.tensors, name)) for name in pair)
            found.append(
                (self.module.kernels[layer], LowRank(down, up, scale * self.factors[layer]))
            )
        for name, entry in _differences(self.names, self.module):
            found.append((entry, Difference(_whole(self.tensors, name), scale)))
        return found


def read_lora(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    prefix: str | None,
    strict: bool = True,
) -> Lora:
    """Read LoRA weights and check all but their sums with the kernels.

    Args:
        module, tensors, prefix, strict: as for `merge_lora`.

    Raises:
        WeightsError: as `merge_lora` would, but for sums.
    """
    known, held = names_of(module), checks.tensors(tensors)
    prefix = _prefix(prefix, held, known)
    said = strength(held, prefix)
    held = SplitLora(held, prefix, known)
    names = [name for name in held if name.startswith(prefix)]
    found = named(names, prefix, known)
    found.written |= {n: held.written[n] for n in found.written if n in held.written}
    checks.arrays(names, held)
    _check_layers(found, prefix, list(held), known, strict)
    for layer, pair in found.pairs.items():
        _check_pair(layer, pair, known.kernels[layer], held)
    for name, entry in _differences(found, known):
        _check_difference(name, entry, held)
    used = [*(name for pair in found.pairs.values() for name in pair), *found.differences.values()]
    checks.dtypes(used, held)
    for name in found.alphas.values():
        _check_alpha(name, held)
    return Lora(held, known, found, _factors(found, held, said))


def _prefix(prefix: str | None, held: Mapping[str, Any], known: ModuleNames) -> str:
    """Return the prefix that was given, or find it and say which, where there are other parts."""
    if prefix is not None:
        checks.prefix(prefix)
        return prefix
    found = lora_prefix.find_prefix(held, known)
    lora_prefix.say_which(found, held)
    return found


def _whole(held: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a tensor on the host in float32."""
    with np.errstate(over="ignore"):
        return read_slice(held, name, (slice(None),) * len(held[name].shape)).astype(np.float32)


def _matrix(x: np.ndarray) -> np.ndarray:
    return x.reshape(x.shape[0], -1)


def _differences(names: LoraNames, module: ModuleNames) -> list[tuple[str, Entry]]:
    """List the tensors that are added as they are, each with its parameter."""
    every = (
        (t, module.parameter(n, DIFFERENCES[kind])) for (n, kind), t in names.differences.items()
    )
    return [(tensor, entry) for tensor, entry in every if entry is not None]


def _factors(names: LoraNames, held: Mapping[str, Any], said: Strength) -> dict[str, float]:
    """Return what each product is multiplied by; a layer's own alpha comes before the metadata.

    Metadata name layers as the file does.
    """
    ranks = {layer: held[pair.down].shape[0] for layer, pair in names.pairs.items()}
    own = {layer: _alpha(held, name) for layer, name in names.alphas.items()}
    return {
        n: own[n] / rank if n in own else said.of(names.written[n], rank)
        for n, rank in ranks.items()
    }


# ---- layers and their matrices -------------------------------------------------------------------


def _check_layers(
    found: LoraNames, prefix: str, names: list[str], known: ModuleNames, strict: bool
) -> None:
    """Refuse layers that the module does not have, or say that they are left out."""
    unknown, count = found.unknown, len(found.unknown) + len(found.written)
    if not count:
        rule = "it holds <layer>.lora_A.weight and <layer>.lora_B.weight"
        raise WeightsError("LoRA", "no weights", rule, "give the right file, or the right prefix")
    more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
    listed = ", ".join(unknown[:LISTED]) + more
    if unknown and (strict or not found.written):
        not_there = f"{len(unknown)} of {count} are not"
        rule = f"each name is a Linear or Conv layer of the module, and {not_there}"
        few = bool(found.written) or count == 1
        remedy = lora_prefix.remedy(unknown, prefix, names, known, few)
        raise WeightsError("LoRA", listed, rule, remedy)
    if unknown:
        log.warning("LoRA: %d of %d layers are left out: %s", len(unknown), count, listed)


def _check_pair(layer: str, pair: LoraPair, entry: Entry, held: Mapping[str, Any]) -> None:
    a, b = tuple(held[pair.down].shape), tuple(held[pair.up].shape)
    shapes, (out_size, *inner) = f"{layer}: {a} and {b}", entry.shape
    if a[:1] == (0,) or b[1:] == (0,):
        rule = "the rank is at least 1: with none, nothing changes"
        raise WeightsError("LoRA", shapes, rule, "leave this layer out")
    rank = a[0] if a else 0
    if _trimmed(a) != _trimmed((rank, *inner)) or _trimmed(b) != (out_size, rank):
        ones = ", 1" * (len(inner) - 1)
        rule = f"lora_A is [rank, {', '.join(map(str, inner))}] and lora_B [{out_size}, rank{ones}]"
        raise WeightsError("LoRA", shapes, rule, _OTHER_MODEL)
    for name in pair:
        _check_finite(name, held)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Leave out the axes of 1 at the end of a kernel's shape: a window of one pixel is none."""
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


def _check_alpha(name: str, held: Mapping[str, Any]) -> None:
    remedy = "leave it out where it is the rank, or fetch the file again"
    shape, dtype = tuple(held[name].shape), dtype_name(held[name].dtype)
    if prod(shape) != 1:
        raise WeightsError("LoRA", f"{name}: shape {shape}", "an alpha is one number", remedy)
    if not (checks.is_floating(dtype) or _INTEGER.fullmatch(dtype)):
        rule = "an alpha is a number of 16 bits or more, or a whole one"
        raise WeightsError("LoRA", f"{name}: {dtype}", rule, remedy)
    if not isfinite(alpha := _alpha(held, name)):
        raise WeightsError("LoRA", f"{name}: {alpha}", "an alpha is a finite number", remedy)


def _alpha(held: Mapping[str, Any], name: str) -> float:
    return float(_whole(held, name).reshape(()))
