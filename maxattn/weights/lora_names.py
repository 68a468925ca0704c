"""Which tensor of a LoRA file is which matrix of which layer, by its name alone.

A name is a prefix, a layer's name and the matrix. Prefixes: diffusers writes the part of its
pipeline, peft its own wrapper, ComfyUI and those who train with the original code
"diffusion_model.", kohya's sd-scripts and musubi-tuner "lora_unet_".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights.naming.module_names import ModuleNames

log = logging.getLogger("maxattn")

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
"""Names of tensors of methods whose change is no product of two matrices."""
PREFIXES: Final = (
    "", "transformer.", "unet.", "diffusion_model.", "model.diffusion_model.", "base_model.model.",
    "base_model.model.transformer.", "base_model.model.unet.", "base_model.model.diffusion_model.",
    "lora_unet_", "lora_transformer_", "lycoris_",
)  # fmt: skip
LONGEST: Final = 1000  # characters of a name whose ends are compared
TEXT: Final = ("text_encoder", "lora_te", "text_model", "conditioner.")
"""How names for text encoders begin."""
# Parts of names of other codes than diffusers'.
_FOREIGN = re.compile(
    r"diffusion_model\.|lora_unet_|lora_transformer_|lycoris_|(self|cross|img|txt)_attn|qkv"
    r"|(double|single|joint|input|output|middle)_blocks?\b|\.attention\.|processor"
)
_CONVERT = "load it in diffusers (load_lora_weights), and save it with save_lora_weights first"


class LoraLayer(NamedTuple):
    """The tensors of one layer.

    Args:
        written: the layer's name in the file.
        tensors: the names of its tensors, by kind: "down" (A), "up" (B), "alpha", "diff", "diff_b".
    """

    written: str
    tensors: dict[str, str]


def layers_of(
    names: Iterable[str], prefix: str, module: ModuleNames
) -> tuple[dict[str, LoraLayer], list[str]]:
    """Sort the tensors of a file by their layers.

    Args:
        names: of the tensors, all with the prefix.
        prefix: of them.
        module: whose layers are meant.

    Returns:
        The module's layers by diffusers' names, and the file's names of layers that it lacks.

    Raises:
        WeightsError: a name that is not LoRA's, half a pair, or two tensors for one purpose.
    """
    parts: dict[str, dict[str, str]] = {}
    for name in names:
        bare = name.removeprefix(prefix)
        found = _NAME.fullmatch(bare)
        if found is None:
            raise _no_lora(name, bare)
        kind = found["other"] or ("down" if found["matrix"] in DOWN else "up")
        tensors = parts.setdefault(found["layer"], {})
        _check_once(found["layer"], tensors.setdefault(kind, name), name)
    for written, tensors in parts.items():
        _check_halves(written, tensors)
    layers: dict[str, LoraLayer] = {}
    unknown: list[str] = []
    for written, tensors in parts.items():
        layer = module.layers.get(written)
        if layer is None or not _has_all(layer, tensors, module):
            unknown.append(written)
        else:
            first = layers.setdefault(layer, LoraLayer(written, tensors))
            _check_once(layer, first.written, written)
    return layers, unknown


def layer_of(name: str) -> str | None:
    """Return the layer's part of a tensor's name; None if the name is not LoRA's."""
    found = _NAME.fullmatch(name)
    return found["layer"] if found else None


def _has_all(layer: str, tensors: Mapping[str, str], module: ModuleNames) -> bool:
    """Whether the module has every parameter that these tensors change."""
    changed = [end for kind, end in DIFFERENCES.items() if kind in tensors]
    has_kernel = layer in module.kernels or "down" not in tensors
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


def _check_halves(layer: str, tensors: Mapping[str, str]) -> None:
    half = {"down", "up"} - tensors.keys()
    if len(half) == 1:
        rule = f"each layer has two matrices, and the {half.pop()} one is missing"
        raise WeightsError("LoRA", layer, rule, "fetch the file again")
    if "alpha" in tensors and half:
        rule = "an alpha belongs to two matrices, and there are none"
        raise WeightsError("LoRA", tensors["alpha"], rule, "remove it")
    if "diff" in tensors and not half:
        rule = "a kernel is changed once: by two matrices, or by a difference"
        raise WeightsError("LoRA", tensors["diff"], rule, "keep one of them")


# ---- prefixes ------------------------------------------------------------------------------------


def find_prefix(held: Mapping[str, Any], module: ModuleNames) -> str:
    """Return the one prefix of `PREFIXES` with which a file names a layer of the module, else "".

    Raises:
        WeightsError: several of them do.
    """
    layers = [layer for name in held if (layer := layer_of(name)) is not None]
    found = [
        prefix
        for prefix in PREFIXES
        if any(n.startswith(prefix) and n[len(prefix) :] in module.layers for n in layers)
    ]
    if len(found) > 1:
        told = " and ".join(f'"{prefix}"' for prefix in found)
        rule = f"layers of the module stand behind {told}, and one of them is merged"
        choices = " or ".join(f'prefix="{prefix}"' for prefix in found)
        raise WeightsError("prefix", "not given", rule, f"pass {choices}")
    return found[0] if found else ""


def log_part(prefix: str, held: Mapping[str, Any]) -> None:
    """Log which part of a file is merged, if it has others."""
    if others := [name for name in held if not name.startswith(prefix)]:
        told = 'LoRA: "%s": %d of %d tensors are merged; those of other parts are not, such as %s'
        log.warning(told, prefix, len(held) - len(others), len(held), others[0])


def remedy(
    unknown: list[str], prefix: str, names: list[str], module: ModuleNames, few: bool
) -> str:
    """Return the remedy for a file with layers that the module lacks.

    Args:
        unknown: those layers, without the prefix.
        prefix: that was taken.
        names: of all tensors of the file.
        module: whose layers are meant.
        few: some layers are known, or there is one alone: then its name may be misspelt.
    """
    layer = next((layer for layer in unknown if not layer.startswith(TEXT)), None)
    if layer is None:
        return "give the LoRA of this module: these are for a text encoder"
    ends = _ends(layer)
    if begin := next((layer[:end] for end in ends if layer[end:] in module.layers), ""):
        whole = prefix + begin
        count = sum(name.startswith(whole) for name in names)
        some = f"all {count}" if count == len(names) else f"{count} of {len(names)}"
        return f'{some} names begin with "{whole}": pass prefix="{whole}"'
    numberless = {re.sub(r"\d+", "#", name) for name in module.layers}
    if any(re.sub(r"\d+", "#", layer[end:]) in numberless for end in (0, *ends)):
        close = did_you_mean(layer, module.kernels)
        return close or "give the LoRA of this model: this one has other numbers of layers"
    if _FOREIGN.search(prefix + layer):
        return _CONVERT
    if not few:
        return "give the LoRA of this model: it has none of these layers, whatever they begin with"
    last = {name.rpartition(".")[2] for name in module.kernels}
    is_close = did_you_mean(layer.rpartition(".")[2], last)
    close = did_you_mean(layer, module.kernels) if is_close else ""
    return close or "pass prefix= where all begin alike, or the module they are for"


def _ends(layer: str) -> list[int]:
    """Return the places after a dot, or after an underscore that no dot follows."""
    ends = [found.end() for found in re.finditer(r"[._]", layer)] if len(layer) < LONGEST else []
    return [end for end in ends if layer[end - 1] == "." or "." not in layer[end:]]
