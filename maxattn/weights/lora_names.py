"""Finds the layer and the matrix of each tensor of a LoRA file, by the tensor's name.

A name has a prefix, the layer's name and the matrix. The prefix is a pipeline's part in diffusers,
the wrapper's name in peft, "diffusion_model." in ComfyUI and in programs with the model's original
code, and "lora_unet_" in kohya's sd-scripts and musubi-tuner.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights.fused import Shown
from maxattn.weights.layer_names import ModuleNames
from maxattn.weights.names import Entry

log = logging.getLogger("maxattn")

DOWN: Final = ("lora_A", "lora.down", "lora_down")
UP: Final = ("lora_B", "lora.up", "lora_up")
DIFFERENCES: Final = {"diff": "weight", "diff_b": "bias"}  # kind of tensor -> changed parameter
_MATRIX = "|".join(map(re.escape, (*DOWN, *UP)))
_NAME = re.compile(
    rf"(?P<layer>.+)\.(?:(?P<matrix>{_MATRIX})(?:\.default)?\.weight|(?P<other>alpha|diff|diff_b))"
)
_MERGE = "merge it with the program that trained it, and load the merged model"
OTHER_MODEL = "pass LoRA weights of this model"
OTHER_METHODS: Final = {
    r".+\.hada_\w+": "LoHa, whose change multiplies two LoRA elementwise",
    r".+\.lokr_\w+": "LoKr, whose change is a Kronecker product",
    r".+\.(dora_scale|lora_magnitude_vector.*)": "DoRA, which scales the columns",
    r".+\.(oft|boft)_\w+.*": "OFT, which rotates the kernel",
    r".+\.lora_mid\.weight": "LoCon with three matrices, where LoRA has two",
}
"""Methods whose change is no product of two matrices, by the names of their tensors."""
PREFIXES: Final = (
    "", "transformer.", "unet.", "diffusion_model.", "model.diffusion_model.", "base_model.model.",
    "base_model.model.transformer.", "base_model.model.unet.", "base_model.model.diffusion_model.",
    "lora_unet_", "lora_transformer_", "lycoris_",
)  # fmt: skip
# Name endings of the tensors that have one row per output channel.
BY_ROW: Final = (".lora_B", ".lora.up", ".lora_up", ".diff", ".diff_b")
LONGEST: Final = 1000  # most characters of a name in which prefixes are searched
TEXT: Final = ("text_encoder", "lora_te", "text_model", "conditioner.")  # prefixes of text encoders
# Parts of names that diffusers does not write.
_FOREIGN = re.compile(
    r"diffusion_model\.|lora_unet_|lora_transformer_|lycoris_|(self|cross|img|txt)_attn|qkv"
    r"|(double|single|joint|input|output|middle)_blocks?\b|\.attention\.|processor"
)
_CONVERT = "load it in diffusers (load_lora_weights) and save it with save_lora_weights first"


class LoraLayer(NamedTuple):
    """A layer's name in the file, and its tensors: "down", "up", "alpha", "diff", "diff_b"."""

    written: str
    tensors: dict[str, str]


def layers_of(
    names: Iterable[str], prefix: str, module: ModuleNames
) -> tuple[dict[str, LoraLayer], list[str]]:
    """Group tensors by the module's layers; list names of layers that the module lacks.

    Raises:
        WeightsError: a name is not LoRA's, a pair is incomplete, or a matrix occurs twice.
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
    """Return the layer in the name of a LoRA tensor; None for other tensors."""
    found = _NAME.fullmatch(name)
    return found["layer"] if found else None


def _has_all(layer: str, tensors: Mapping[str, str], module: ModuleNames) -> bool:
    """Check whether the module has every parameter that these tensors change."""
    changed = [end for kind, end in DIFFERENCES.items() if kind in tensors]
    has_kernel = layer in module.kernels or "down" not in tensors
    return has_kernel and all(module.parameter(layer, end) for end in changed)


def _no_lora(name: str, bare: str) -> WeightsError:
    for pattern, method in OTHER_METHODS.items():
        if re.fullmatch(pattern, bare):
            return WeightsError("LoRA", name, f"it must be LoRA, and this is {method}", _MERGE)
    rule = "it must be <layer>.lora_A.weight, <layer>.lora_B.weight or <layer>.alpha"
    return WeightsError("LoRA", name, rule, "save LoRA with diffusers' save_lora_weights")


def _check_once(layer: str, first: str, name: str) -> None:
    if name != first:
        rule = f"layer {layer} must have one pair of matrices, and {first} names it too"
        remedy = "keep only one of the two spellings in the file"
        raise WeightsError("LoRA", name, rule, remedy)


def _check_halves(layer: str, tensors: Mapping[str, str]) -> None:
    half = {"down", "up"} - tensors.keys()
    if len(half) == 1:
        rule = f"each layer must have two matrices, and its {half.pop()} matrix is missing"
        raise WeightsError("LoRA", layer, rule, "download the file again")
    if "alpha" in tensors and half:
        rule = "an alpha needs two matrices, and its layer has none"
        raise WeightsError("LoRA", tensors["alpha"], rule, "remove the alpha")
    if "diff" in tensors and not half:
        rule = "a layer must have two matrices or a .diff, not both"
        raise WeightsError("LoRA", tensors["diff"], rule, "remove the matrices or the .diff")


# ---- tensors of several layers -------------------------------------------------------------------


def split_lora(
    held: Mapping[str, Any], prefix: str, module: ModuleNames
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Replace fused tensors by their layers; return the layers' names in the file.

    W' = [W_1; W_2] + B A  is  W_1' = W_1 + B_1 A,  W_2' = W_2 + B_2 A
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
            own = entry.owner
            new, stop = f"{prefix}{own}{end}", start + entry.shape[0]
            if new in held or new in where:
                rule = f"each layer must have one pair of matrices, and {name} is for {own} too"
                raise WeightsError("LoRA", new, rule, "remove the wrong one of the two")
            where[new] = name, slice(start, stop) if by_row else None
            written_as[own], start = layer, stop
    return (Shown(held, where) if written_as else held), written_as


def _check_rows(name: str, shape: tuple[int, ...], parts: tuple[Entry, ...]) -> None:
    total = sum(entry.shape[0] for entry in parts)
    if shape[:1] != (total,):
        layers = ", ".join(entry.owner for entry in parts)
        rule = f"it must have {total} rows, as many as {layers} together"
        raise WeightsError("LoRA", f"{name}: {shape}", rule, OTHER_MODEL)


# ---- prefixes ------------------------------------------------------------------------------------


def find_prefix(held: Mapping[str, Any], module: ModuleNames) -> str:
    """Return the prefix of `PREFIXES` with which a file names layers of the module, else ""."""
    layers = [layer for name in held if (layer := layer_of(name)) is not None]
    found = [
        prefix
        for prefix in PREFIXES
        if any(n.startswith(prefix) and n[len(prefix) :] in module.layers for n in layers)
    ]
    if len(found) > 1:
        several = " and ".join(f'"{prefix}"' for prefix in found)
        rule = f"one prefix must be chosen, and layers of the module have the prefixes {several}"
        choices = " or ".join(f'prefix="{prefix}"' for prefix in found)
        raise WeightsError("prefix", "not given", rule, f"pass {choices}")
    return found[0] if found else ""


def log_part(prefix: str, held: Mapping[str, Any]) -> None:
    """Log which part of a file is merged, if the file has other parts."""
    if others := [name for name in held if not name.startswith(prefix)]:
        message = 'LoRA: merging %d of %d tensors, with prefix "%s"; %s, for example, is left out'
        log.warning(message, len(held) - len(others), len(held), prefix, others[0])


def remedy(
    unknown: list[str], prefix: str, names: list[str], module: ModuleNames, few: bool
) -> str:
    """Return the remedy for a file with `unknown` layers, which the module lacks.

    If `few` (some layers are known, or only one is unknown), a name may be misspelt.
    """
    layer = next((layer for layer in unknown if not layer.startswith(TEXT)), None)
    if layer is None:
        return "pass the LoRA of this module; these weights are for a text encoder"
    ends = _ends(layer)
    if begin := next((layer[:end] for end in ends if layer[end:] in module.layers), ""):
        whole = prefix + begin
        count = sum(name.startswith(whole) for name in names)
        some = f"all {count}" if count == len(names) else f"{count} of {len(names)}"
        return f'{some} names begin with "{whole}": pass prefix="{whole}"'
    numberless = {re.sub(r"\d+", "#", name) for name in module.layers}
    if any(re.sub(r"\d+", "#", layer[end:]) in numberless for end in (0, *ends)):
        close = did_you_mean(layer, module.kernels)
        return close or f"{OTHER_MODEL}; these are for another number of layers"
    if _FOREIGN.search(prefix + layer):
        return _CONVERT
    if not few:
        return f"{OTHER_MODEL}; these weights have none of its layers, with any prefix"
    last = {name.rpartition(".")[2] for name in module.kernels}
    is_close = did_you_mean(layer.rpartition(".")[2], last)
    close = did_you_mean(layer, module.kernels) if is_close else ""
    return close or "pass prefix= if all names have one, or pass the module with these layers"


def _ends(layer: str) -> list[int]:
    """Return the positions in a name after a dot, or after an underscore that no dot follows."""
    ends = [found.end() for found in re.finditer(r"[._]", layer)] if len(layer) < LONGEST else []
    return [end for end in ends if layer[end - 1] == "." or "." not in layer[end:]]
