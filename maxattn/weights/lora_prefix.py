"""What the names of LoRA weights begin with: found where it is one that programs write, else said.

diffusers writes the part of its pipeline, peft its own wrapper, ComfyUI and those who train with
the original code "diffusion_model.", kohya's sd-scripts and musubi-tuner "lora_unet_".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights.lora_names import layer_of
from maxattn.weights.naming.module_names import ModuleNames

log = logging.getLogger("maxattn")

PREFIXES: Final = (
    "",
    "transformer.",
    "unet.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.transformer.",
    "base_model.model.unet.",
    "base_model.model.diffusion_model.",
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
)
LONGEST: Final = 1000  # characters of a name that is compared from many places on
TEXT: Final = ("text_encoder", "lora_te", "text_model", "conditioner.")
"""How names for text encoders begin."""
# What stands in names of other codes than diffusers'.
_FOREIGN = re.compile(
    r"diffusion_model\.|lora_unet_|lora_transformer_|lycoris_|(self|cross|img|txt)_attn|qkv"
    r"|(double|single|joint|input|output|middle)_blocks?\b|\.attention\.|processor"
)
_CONVERT = "load it in diffusers (load_lora_weights), and save it with save_lora_weights first"


def find_prefix(names: Iterable[str], module: ModuleNames) -> str:
    """Return what the names of a module's LoRA begin with.

    Args:
        names: of the tensors.
        module: whose layers are meant.

    Returns:
        The one prefix of `PREFIXES` behind which a layer of the module stands; "" where none is.

    Raises:
        WeightsError: there are several.
    """
    layers = [layer for name in names if (layer := layer_of(name)) is not None]
    found = [prefix for prefix in PREFIXES if _stands(prefix, layers, module)]
    if len(found) > 1:
        told = " and ".join(f'"{prefix}"' for prefix in found)
        rule = f"layers of the module stand behind {told}, and one of them is merged"
        remedy = " or ".join(f'prefix="{prefix}"' for prefix in found)
        raise WeightsError("prefix", "not given", rule, f"pass {remedy}")
    return found[0] if found else ""


def _stands(prefix: str, layers: Iterable[str], module: ModuleNames) -> bool:
    return any(n.startswith(prefix) and n[len(prefix) :] in module.layers for n in layers)


def say_which(prefix: str, held: Mapping[str, Any]) -> None:
    """Log which part of a file was taken, where it has others."""
    if others := [name for name in held if not name.startswith(prefix)]:
        told = '"%s": %d of %d tensors are merged; those of other parts are not, such as %s'
        log.warning(f"LoRA: {told}", prefix, len(held) - len(others), len(held), others[0])


def remedy(
    unknown: list[str], prefix: str, names: list[str], module: ModuleNames, few: bool = True
) -> str:
    """Say what would help where a file names layers that the module does not have.

    Args:
        unknown: those layers, without the prefix.
        prefix: that was taken.
        names: of all tensors of the file.
        module: whose layers are meant.
        few: whether one layer is unknown, or others are not: then its name may be misspelt.
    """
    others = [layer for layer in unknown if not layer.startswith(TEXT)]
    if not others:
        return "give the LoRA of this module: these are for a text encoder"
    if begin := _begin_of(others[0], module):
        whole = prefix + begin
        count = sum(name.startswith(whole) for name in names)
        some = f"all {count}" if count == len(names) else f"{count} of {len(names)}"
        return f'{some} names begin with "{whole}": pass prefix="{whole}"'
    if _is_of_another_size(others[0], module):
        close = did_you_mean(others[0], module.kernels)
        return close or "give the LoRA of this model: this one has other numbers of layers"
    if _FOREIGN.search(prefix + others[0]):
        return _CONVERT
    if not few:
        return "give the LoRA of this model: it has none of these layers, whatever they begin with"
    other = "pass prefix= where all begin alike, or the module they are for"
    return _close(others[0], module) or other


def _begin_of(layer: str, module: ModuleNames) -> str:
    """Return the beginning without which a layer's name is one of the module's."""
    return next((layer[:end] for end in _ends(layer) if layer[end:] in module.layers), "")


def _is_of_another_size(layer: str, module: ModuleNames) -> bool:
    """Say whether a name, without its beginning, is one of the module's but for its numbers."""
    numberless = {_numberless(name) for name in module.layers}
    return any(_numberless(layer[end:]) in numberless for end in (0, *_ends(layer)))


def _close(layer: str, module: ModuleNames) -> str:
    """Name the closest layer where the last part of its name is close, too."""
    last = {name.rpartition(".")[2] for name in module.kernels}
    is_close = did_you_mean(layer.rpartition(".")[2], last)
    return did_you_mean(layer, module.kernels) if is_close else ""


def _ends(layer: str) -> list[int]:
    """Return where a name goes on after a dot, or after an underscore where no dot follows; of very
    long ones none.
    """
    ends = [found.end() for found in re.finditer(r"[._]", layer)] if len(layer) < LONGEST else []
    return [end for end in ends if layer[end - 1] == "." or "." not in layer[end:]]


def _numberless(layer: str) -> str:
    return re.sub(r"\d+", "#", layer)
