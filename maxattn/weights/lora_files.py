"""Reads LoRA weights and checks them against a module; nothing is merged here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights import checks
from maxattn.weights.access import dtype_name, read_slice
from maxattn.weights.checks import LISTED
from maxattn.weights.lora_alphas import Strength, strength
from maxattn.weights.names import Entry, entries
from maxattn.weights.patterns import OutOfReach

DOWN, UP = ("lora_A", "lora.down", "lora_down"), ("lora_B", "lora.up", "lora_up")
_NAMES = "|".join(map(re.escape, (*DOWN, *UP)))
_PART = re.compile(rf"(?P<layer>.+)\.(?P<part>{_NAMES})(?:\.default)?\.weight")
_INTEGER = re.compile(r"u?int(8|16|32|64)")
_ALPHA = re.compile(r"(?P<layer>.+)\.alpha")


class LoraPair(NamedTuple):
    """Name the two matrices of a layer: A [rank, in] and B [out, rank]."""

    down: str
    up: str


class LoraNames(NamedTuple):
    """Hold which tensors are the matrices of each layer, and which its alpha."""

    layers: dict[str, LoraPair]
    alphas: dict[str, str]


class Lora(NamedTuple):
    """Hold LoRA weights that fit a module.

    Args:
        tensors: by name.
        entries: the kernel of each layer of the module.
        layers: the two tensors of each layer.
        factors: what each product is multiplied by, before the caller's scale.
    """

    tensors: Mapping[str, Any]
    entries: dict[str, Entry]
    layers: dict[str, LoraPair]
    factors: dict[str, float]


def read_lora(module: nnx.Module, tensors: Mapping[str, Any] | str | Path, prefix: str) -> Lora:
    """Read LoRA weights and check all but their sums with the kernels.

    Args:
        module, tensors, prefix: as for `merge_lora`.

    Raises:
        WeightsError: as `merge_lora` would, but for sums.
    """
    checks.prefix(prefix)
    every = {e.name.removesuffix(".weight"): e for e in entries(module) if e.axes == (1, 0)}
    held = checks.tensors(tensors)
    said = strength(held, prefix)
    names = [name for name in held if name.startswith(prefix)]
    layers, alphas = _named(names, prefix)
    checks.arrays(names, held)
    _check_layers(layers, every)
    for layer, pair in layers.items():
        _check_pair(layer, pair, every[layer], held)
    checks.dtypes((name for pair in layers.values() for name in pair), held)
    for name in alphas.values():
        _check_alpha(name, held)
    return Lora(held, every, layers, _factors(layers, alphas, held, said))


def whole(held: Mapping[str, Any], name: str) -> np.ndarray:
    """Return a tensor on the host in float32."""
    with np.errstate(over="ignore"):
        return read_slice(held, name, (slice(None),) * len(held[name].shape)).astype(np.float32)


def _factors(
    layers: dict[str, LoraPair], alphas: dict[str, str], held: Mapping[str, Any], said: Strength
) -> dict[str, float]:
    """Return what each product is multiplied by; a layer's own alpha comes before the metadata."""
    ranks = {layer: held[pair.down].shape[0] for layer, pair in layers.items()}
    own = {layer: _alpha(held, name) for layer, name in alphas.items()}
    try:
        return {n: own[n] / rank if n in own else said.of(n, rank) for n, rank in ranks.items()}
    except OutOfReach as error:
        remedy = "save the LoRA again with names of layers, or with an alpha for each layer"
        raise WeightsError("LoRA", "alpha_pattern", str(error), remedy) from error


# ---- names ---------------------------------------------------------------------------------------


def _named(names: list[str], prefix: str) -> LoraNames:
    found: dict[str, dict[str, str]] = {}
    alphas: dict[str, str] = {}
    for name in names:
        bare = name.removeprefix(prefix)
        if part := _PART.fullmatch(bare):
            side = "down" if part["part"] in DOWN else "up"
            first = found.setdefault(part["layer"], {}).setdefault(side, name)
            _check_once(part["layer"], first, name)
        elif alpha := _ALPHA.fullmatch(bare):
            alphas[alpha["layer"]] = name
        else:
            raise _no_lora(name)
    _check_halves(found, alphas)
    return LoraNames({layer: LoraPair(s["down"], s["up"]) for layer, s in found.items()}, alphas)


def _no_lora(name: str) -> WeightsError:
    rule = "LoRA weights are named <layer>.lora_A.weight, <layer>.lora_B.weight and <layer>.alpha"
    return WeightsError("LoRA", name, rule, "save them with diffusers' save_lora_weights")


def _check_once(layer: str, first: str, name: str) -> None:
    if name != first:
        rule = f"each layer has one pair of matrices, and {layer} has {first} too"
        remedy = "keep one spelling: lora_A and lora_B, or lora.down and lora.up"
        raise WeightsError("LoRA", name, rule, remedy)


def _check_halves(found: dict[str, dict[str, str]], alphas: dict[str, str]) -> None:
    if half := [layer for layer, sides in found.items() if len(sides) == 1]:
        side = "up" if "down" in found[half[0]] else "down"
        rule = f"each layer has two matrices, and the {side} one is missing"
        raise WeightsError("LoRA", half[0], rule, "fetch the file again")
    if lone := sorted(alphas.keys() - found.keys()):
        rule = "an alpha belongs to two matrices, and there are none"
        raise WeightsError("LoRA", alphas[lone[0]], rule, "remove it")


# ---- layers and their matrices -------------------------------------------------------------------


def _check_layers(layers: dict[str, LoraPair], every: dict[str, Entry]) -> None:
    if not layers:
        rule = "it holds <layer>.lora_A.weight and <layer>.lora_B.weight"
        raise WeightsError("LoRA", "no weights", rule, "give the right file, or the right prefix")
    if unknown := [layer for layer in layers if layer not in every]:
        more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        count = f"{len(unknown)} of {len(layers)} are not"
        rule = f"each name is a Linear layer of the module, and {count}"
        other = "pass prefix= where all begin alike, or the module they are for"
        remedy = did_you_mean(unknown[0], every) or other
        raise WeightsError("LoRA", ", ".join(unknown[:LISTED]) + more, rule, remedy)


def _check_pair(layer: str, pair: LoraPair, entry: Entry, held: Mapping[str, Any]) -> None:
    a, b = tuple(held[pair.down].shape), tuple(held[pair.up].shape)
    shapes, (out_size, in_size) = f"{layer}: {a} and {b}", entry.shape
    if a[:1] == (0,) or b[1:] == (0,):
        rule = "the rank is at least 1: with none, nothing changes"
        raise WeightsError("LoRA", shapes, rule, "leave this layer out")
    if len(a) != 2 or len(b) != 2 or (b[0], a[1]) != entry.shape or a[0] != b[1]:
        rule = f"lora_A is [rank, {in_size}] and lora_B [{out_size}, rank]"
        raise WeightsError("LoRA", shapes, rule, "give LoRA weights of this model")
    for name in pair:
        if not np.isfinite(whole(held, name)).all():
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
    return float(whole(held, name).reshape(()))
