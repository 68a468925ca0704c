"""Finds the layer and the matrix of each tensor of a LoRA file, by the tensor's name.

A name has a prefix, the layer's name and the matrix. The prefix is a pipeline's part in diffusers,
the wrapper's name in peft, "diffusion_model." in ComfyUI and in programs with the model's original
code, and "lora_unet_" in kohya's sd-scripts and musubi-tuner. LightX2V writes the change of
`X.modulation` as `X.diff_m`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from maxattn.errors import WeightsError, did_you_mean
from maxattn.weights.fused import SWAPPED, Shown
from maxattn.weights.layer_names import ModuleNames
from maxattn.weights.name_tables import FLUX_SWAPPED
from maxattn.weights.names import Entry

log = logging.getLogger("maxattn")

DOWN: Final = ("lora_A", "lora.down", "lora_down", "down")
UP: Final = ("lora_B", "lora.up", "lora_up", "up")
# Kind of tensor -> changed parameter; "up_b" is the bias of B, multiplied by alpha / rank.
DIFFERENCES: Final = {"diff": "weight", "diff_b": "bias", "up_b": "bias"}
_UP = "|".join(map(re.escape, UP))
_NAME = re.compile(
    rf"(?P<layer>.+?)\.(?:(?P<down>{'|'.join(map(re.escape, DOWN))})(?:\.default)?\.weight"
    rf"|(?:{_UP})(?:\.default)?\.(?P<up>weight|bias)|(?P<other>alpha|diff|diff_b|diff_m))"
)
_MODULATION = ".modulation"
_MERGE = "merge it with the program that trained it, and load the merged model"
OTHER_MODEL = "pass LoRA weights of this model"
LEAVE_OUT = "pass strict=False to leave out what does not fit"
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
    "pipe.dit.", "lora_unet_", "lora_transformer_", "lycoris_",
)  # fmt: skip
# Name endings of the tensors that have one row per output channel.
BY_ROW: Final = (".lora_B", ".lora.up", ".lora_up", ".up", ".diff", ".diff_b")
MOST_COMPARED: Final = 1000  # most layers of which the numbers of blocks are compared
LONGEST: Final = 1000  # most characters of a name in which prefixes are searched
TEXT: Final = ("text_encoder", "lora_te", "text_model", "conditioner.")  # prefixes of text encoders
# Parts of names that diffusers does not write.
_FOREIGN = re.compile(
    r"diffusion_model\.|lora_unet_|lora_transformer_|lycoris_|(self|cross|img|txt)_attn|qkv"
    r"|(double|single|joint|input|output|middle)_blocks?\b|\.attention\.|processor"
)
_CONVERT = "load it in diffusers (load_lora_weights) and save it with save_lora_weights first"


class LoraLayer(NamedTuple):
    """A layer's name in the file, and its tensors by kind: alpha, down, up or `DIFFERENCES`."""

    written: str
    tensors: dict[str, str]


def layers_of(
    names: Iterable[str], prefix: str, module: ModuleNames, strict: bool
) -> tuple[dict[str, LoraLayer], list[str]]:
    """Group tensors by layer; list layers that the module lacks, and names that are not LoRA's."""
    parts: dict[str, dict[str, str]] = {}
    unknown: list[str] = []
    for name in names:
        bare = name.removeprefix(prefix)
        if (found := _parsed(bare)) is None:
            if strict:
                raise _no_lora(name, bare)
            unknown.append(name)
            continue
        layer, kind = found
        tensors = parts.setdefault(layer, {})
        _check_once(layer, tensors.setdefault(kind, name), name)
    # Without one of its tensors, a layer's change would be another one.
    partial = {begin for name in unknown for begin in _owners(name.removeprefix(prefix))}
    layers: dict[str, LoraLayer] = {}
    for written, tensors in parts.items():
        if written in partial:
            unknown.append(written)
            continue
        _check_halves(written, tensors)
        layer = module.layers.get(written)
        if layer is None or not _has_all(layer, tensors, module):
            unknown.append(written)
        else:
            first = layers.setdefault(layer, LoraLayer(written, tensors))
            _check_once(layer, first.written, written)
    return layers, unknown


def _owners(name: str) -> Iterator[str]:
    """Yield the names of layers that a tensor may belong to: prefixes of its name."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _parsed(name: str) -> tuple[str, str] | None:
    """Return the layer and the kind of a LoRA tensor; None for other tensors."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    if found["other"] == "diff_m":
        return found["layer"] + _MODULATION, "diff"
    kind = found["other"] or (
        "down" if found["down"] else {"weight": "up", "bias": "up_b"}[found["up"]]
    )
    return found["layer"], kind


def layer_of(name: str) -> str | None:
    """Return the layer in the name of a LoRA tensor; None for other tensors."""
    found = _parsed(name)
    return found[0] if found else None


def _has_all(layer: str, tensors: Mapping[str, str], module: ModuleNames) -> bool:
    changed = [end for kind, end in DIFFERENCES.items() if kind in tensors]
    has_kernel = layer in module.kernels or "down" not in tensors
    return has_kernel and all(module.parameter(layer, end) for end in changed)


def _no_lora(name: str, bare: str) -> WeightsError:
    for pattern, method in OTHER_METHODS.items():
        if re.fullmatch(pattern, bare):
            return WeightsError("LoRA", name, f"it must be LoRA, and this is {method}", _MERGE)
    rule = "it must be <layer>.lora_A.weight, <layer>.lora_B.weight or <layer>.alpha"
    return WeightsError("LoRA", name, rule, f"{LEAVE_OUT}, or remove it from the file")


def _check_once(layer: str, first: str, name: str) -> None:
    if name != first:
        rule = f"layer {layer} must have one pair of matrices, and {first} names it too"
        remedy = "keep only one of the two spellings in the file"
        raise WeightsError("LoRA", name, rule, remedy)


def _check_halves(layer: str, tensors: Mapping[str, str]) -> None:
    half = {"down", "up"} - tensors.keys()
    if len(half) == 1:
        rule = f"each layer must have two matrices, and its {half.pop()} matrix is missing"
        remedy = "pass lora_A and lora_B of each layer; download a file again that lacks one"
        raise WeightsError("LoRA", layer, rule, remedy)
    for kind, told in (("alpha", "an alpha"), ("up_b", "a bias of lora_B")):
        if kind in tensors and half:
            rule = f"{told} needs two matrices, and its layer has none"
            raise WeightsError("LoRA", tensors[kind], rule, f"remove the {told.split()[1]}")
    if "diff" in tensors and not half:
        rule = "a layer must have two matrices or a .diff, not both"
        raise WeightsError("LoRA", tensors["diff"], rule, "remove the matrices or the .diff")
    if "diff_b" in tensors and "up_b" in tensors:
        rule = "a layer must have a bias of lora_B or a .diff_b, not both"
        raise WeightsError("LoRA", tensors["diff_b"], rule, "remove one of the two")


# ---- tensors of several layers -------------------------------------------------------------------


def split_lora(
    held: Mapping[str, Any], prefix: str, module: ModuleNames, strict: bool
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Replace fused tensors by their layers; return the layers' names in the file.

    If not `strict`, layers of which a tensor has another number of rows stay as they are.

    W' = [W_1; W_2] + B A  is  W_1' = W_1 + B_1 A,  W_2' = W_2 + B_2 A
    """
    where: dict[str, tuple[str, slice | str | None]] = {}
    written_as: dict[str, str] = {}
    layers = {n: layer_of(n.removeprefix(prefix)) or "" for n in held if n.startswith(prefix)}
    fused = {n: module.fused.get(module.layers.get(layer, ""), ()) for n, layer in layers.items()}
    misfits = set()
    for name, parts in fused.items():
        if parts and name.removeprefix(prefix).removeprefix(layers[name]).startswith(BY_ROW):
            if strict:
                _check_rows(name, held[name], parts)
            elif not _has_rows(held[name], parts):
                misfits.add(layers[name])
    for name in held if any(fused.values()) else ():
        layer, parts = layers.get(name, ""), fused.get(name, ())
        if not parts or layer in misfits:
            where[name] = name, None
            continue
        end, start = name.removeprefix(prefix).removeprefix(layer), 0
        by_row = end.startswith(BY_ROW)
        for entry in parts:
            own = entry.owner
            new, stop = f"{prefix}{own}{end}", start + entry.shape[0]
            if new in held or new in where:
                rule = f"each layer must have one pair of matrices, and {name} is for {own} too"
                raise WeightsError("LoRA", new, rule, "remove the wrong one of the two")
            rows = SWAPPED if module.layers[layer] in FLUX_SWAPPED else slice(start, stop)
            where[new] = name, rows if by_row else None
            written_as[own], start = layer, stop
    return (Shown(held, where) if written_as else held), written_as


def _has_rows(tensor: Any, parts: tuple[Entry, ...]) -> bool:
    shape = tuple(getattr(tensor, "shape", None) or ())
    return shape[:1] == (sum(entry.shape[0] for entry in parts),)


def _check_rows(name: str, tensor: Any, parts: tuple[Entry, ...]) -> None:
    if not _has_rows(tensor, parts):
        layers = ", ".join(entry.owner for entry in parts)
        total = sum(entry.shape[0] for entry in parts)
        rule = f"it must have {total} rows, as many as {layers} together"
        found = f"{name}: {tuple(getattr(tensor, 'shape', None) or ())}"
        raise WeightsError("LoRA", found, rule, OTHER_MODEL)


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
    unknown: list[str], prefix: str, names: list[str], module: ModuleNames, known: int
) -> str:
    """Return the remedy for `unknown` layers; if others are `known`, a name may be misspelt."""
    layer = next((layer for layer in unknown if not layer.startswith(TEXT)), None)
    if layer is None:
        return "pass the LoRA of this module; these weights are for a text encoder"
    ends = _ends(layer)
    begin = next((layer[:end] for end in ends if layer[end:] in module.layers), "")
    if begin and not known:
        whole = prefix + begin
        count = sum(name.startswith(whole) for name in names)
        some = f"all {count}" if count == len(names) else f"{count} of {len(names)}"
        return f'{some} names begin with "{whole}": pass prefix="{whole}"'
    if blocks := _ranges(unknown[:MOST_COMPARED], prefix, names, module):
        return f"{OTHER_MODEL}; {blocks}"
    if not known and _FOREIGN.search(prefix + layer):
        return _CONVERT
    if not known and len(unknown) > 1:
        return f"{OTHER_MODEL}; these weights have none of its layers, with any prefix"
    last = {name.rpartition(".")[2] for name in module.kernels}
    is_close = did_you_mean(layer.rpartition(".")[2], last)
    close = did_you_mean(layer, module.kernels) if is_close else ""
    if known:
        return f"{LEAVE_OUT}, or pass the module with these layers" + (close and f"; {close}")
    return close or "pass prefix= if all names have one, or pass the module with these layers"


def _ranges(unknown: list[str], prefix: str, names: list[str], module: ModuleNames) -> str:
    """Return "the file has blocks 0 to 39, and the module blocks 0 to 29", "" for other layers."""
    numberless = {_numberless(name) for name in module.layers}
    ours = cache(lambda stem: _numbers(stem, module.layers))
    for layer, end in ((x, end) for x in unknown for end in (0, *_ends(x))):
        if _numberless(layer[end:]) not in numberless:
            continue
        for number in re.finditer(r"(?<=[._])\d+(?=[._])", layer[end:]):
            stem, begin = layer[end : end + number.start()], prefix + layer[:end]
            if ours(stem) and number[0] not in map(str, ours(stem)):
                theirs = _numbers(begin + stem, names)
                what = stem.rstrip("._").rpartition(".")[2]
                there, here = (_span(what, numbers) for numbers in (theirs, ours(stem)))
                return f"the file has {there}, and the module {here}"
    return ""


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(stem: str, names: Iterable[str]) -> set[int]:
    """Return the numbers right after a stem, in all names that begin with it."""
    rests = (name[len(stem) :] for name in names if name.startswith(stem))
    return {int(found[0]) for rest in rests if (found := re.match(r"\d{1,9}(?=[._])", rest))}


def _span(what: str, numbers: set[int]) -> str:
    first, last = min(numbers, default=0), max(numbers, default=0)
    return f"{what} {first}" + (f" to {last}" if last > first else "")


def _ends(layer: str) -> list[int]:
    """Return the positions in a name after a dot, or after an underscore that no dot follows."""
    ends = [found.end() for found in re.finditer(r"[._]", layer)] if len(layer) < LONGEST else []
    return [end for end in ends if layer[end - 1] == "." or "." not in layer[end:]]
