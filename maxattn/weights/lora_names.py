"""Which tensor of a LoRA file is which matrix of which layer, by its name alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from maxattn.errors import WeightsError
from maxattn.weights.naming.module_names import ModuleNames

DOWN: Final = ("lora_A", "lora.down", "lora_down")
UP: Final = ("lora_B", "lora.up", "lora_up")
DIFFERENCES: Final = {"diff": "weight", "diff_b": "bias"}
"""The parameter that a difference is added to."""
_MATRIX = "|".join(map(re.escape, (*DOWN, *UP)))
_NAME = re.compile(
    rf"(?P<layer>.+)\.(?:(?P<matrix>{_MATRIX})(?:\.default)?\.weight|(?P<other>alpha|diff|diff_b))"
)
_MERGE = "merge it with the program that trained it, and load the merged model"
OTHER_METHODS: Final = (
    (re.compile(r".+\.hada_\w+"), "LoHa, whose change is a product of two LoRA"),
    (re.compile(r".+\.lokr_\w+"), "LoKr, whose change is a Kronecker product"),
    (re.compile(r".+\.(dora_scale|lora_magnitude_vector.*)"), "DoRA, which scales the columns"),
    (re.compile(r".+\.(oft|boft)_\w+.*"), "OFT, which rotates the kernel"),
    (re.compile(r".+\.lora_mid\.weight"), "LoCon in three matrices, where LoRA has two"),
)
"""Names that tell of a method whose change is no product of two matrices."""


class LoraPair(NamedTuple):
    """Name the two matrices of a layer: A [rank, in] and B [out, rank]."""

    down: str
    up: str


@dataclass
class LoraNames:
    """Hold which tensors are for which layers.

    Args:
        pairs: the matrices of each layer of the module, by its name in diffusers.
        alphas: the tensors that hold their alphas.
        differences: tensors that are added as they are, by layer and "diff" or "diff_b".
        written: the layer's name as the file has it.
        unknown: names of layers, as the file has them, that the module does not have.
    """

    pairs: dict[str, LoraPair] = field(default_factory=dict)
    alphas: dict[str, str] = field(default_factory=dict)
    differences: dict[tuple[str, str], str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def layer_of(name: str) -> str | None:
    """Return the layer's part of a tensor's name; None of a name that is not LoRA's."""
    found = _NAME.fullmatch(name)
    return found["layer"] if found else None


def named(names: Iterable[str], prefix: str, module: ModuleNames) -> LoraNames:
    """Sort the tensors of a file by the layers that they are for.

    Args:
        names: of the tensors, all with the prefix.
        prefix: of them.
        module: whose layers are meant.

    Raises:
        WeightsError: a name that is not LoRA's, half a pair, or two tensors for one purpose.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        found = _NAME.fullmatch(name.removeprefix(prefix))
        if found is None:
            raise _no_lora(name, name.removeprefix(prefix))
        kind = found["other"] or ("down" if found["matrix"] in DOWN else "up")
        first = parts.setdefault(found["layer"], {}).setdefault(kind, name)
        _check_once(found["layer"], first, name)
    _check_halves(parts)
    return _by_layer(parts, module)


def _by_layer(parts: dict[str, dict[str, str]], module: ModuleNames) -> LoraNames:
    result = LoraNames()
    for written, held in parts.items():
        layer = module.layers.get(written)
        if layer is None or not _has_all(layer, held, module):
            result.unknown.append(written)
            continue
        first = result.written.setdefault(layer, written)
        _check_once(layer, first, written)
        if "down" in held:
            result.pairs[layer] = LoraPair(held["down"], held["up"])
        if "alpha" in held:
            result.alphas[layer] = held["alpha"]
        result.differences |= {(layer, kind): held[kind] for kind in DIFFERENCES if kind in held}
    return result


def _has_all(layer: str, held: dict[str, str], module: ModuleNames) -> bool:
    """Say whether the module has every parameter that these tensors change."""
    changed = [end for kind, end in DIFFERENCES.items() if kind in held]
    has_kernel = layer in module.kernels or "down" not in held
    return has_kernel and all(module.parameter(layer, end) for end in changed)


def _no_lora(name: str, bare: str) -> WeightsError:
    for pattern, method in OTHER_METHODS:
        if pattern.fullmatch(bare):
            return WeightsError("LoRA", name, f"the weights are of LoRA; this is {method}", _MERGE)
    rule = "LoRA weights are named <layer>.lora_A.weight, <layer>.lora_B.weight and <layer>.alpha"
    return WeightsError("LoRA", name, rule, "save them with diffusers' save_lora_weights")


def _check_once(layer: str, first: str, name: str) -> None:
    if name != first:
        rule = f"each layer has one pair of matrices, and {layer} has {first} too"
        remedy = "keep one spelling: lora_A and lora_B, or lora.down and lora.up"
        raise WeightsError("LoRA", name, rule, remedy)


def _check_halves(parts: dict[str, dict[str, str]]) -> None:
    for layer, held in parts.items():
        if half := {"down", "up"} - held.keys() if {"down", "up"} & held.keys() else set():
            rule = f"each layer has two matrices, and the {half.pop()} one is missing"
            raise WeightsError("LoRA", layer, rule, "fetch the file again")
        if "alpha" in held and "down" not in held:
            rule = "an alpha belongs to two matrices, and there are none"
            raise WeightsError("LoRA", held["alpha"], rule, "remove it")
        if {"diff", "down"} <= held.keys():
            rule = "a kernel is changed once: by two matrices, or by a difference"
            raise WeightsError("LoRA", held["diff"], rule, "keep one of them")
