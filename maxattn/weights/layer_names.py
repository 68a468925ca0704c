"""Lists all names that files use for a module's layers.

A layer has diffusers' name, a name in the model's original code, and both names with underscores
for dots (kohya's sd-scripts). Programs that train with the original code put prefixes before names
("generator_ema.model." for averaged parameters, "generator.model." for the last step's); FSDP
inserts "_fsdp_wrapped_module.".

Sources: Wan 2.1, https://github.com/Wan-Video/Wan2.1 (wan/modules/model.py), whose names ComfyUI,
lightx2v, diffusion-pipe and musubi-tuner write; Stability's generative-models,
https://github.com/Stability-AI/generative-models (openaimodel.py), whose names kohya's sd-scripts
write for LoRA of SDXL. `name_tables` has the other models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights.fused import Shown, grouped
from maxattn.weights.name_tables import FLUX_SWAPPED, PUBLISHED, checked_table, written_names
from maxattn.weights.names import Entry, entries, variable_at

log = logging.getLogger("maxattn")

# Averaged parameters first: they give better samples than the last step's.
PREFIXES: Final = (
    "generator_ema.model.", "generator_ema.", "generator.model.", "generator.", "model.", "",
    "model.diffusion_model.", "diffusion_model.",
)  # fmt: skip
FSDP: Final = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class ModuleNames:
    """The parameters of a module, and every name of its layers."""

    entries: Mapping[str, Entry]  # the parameters, by diffusers' names
    kernels: Mapping[str, Entry]  # kernels of Linear and Conv layers, by the layers' names
    layers: Mapping[str, str]  # diffusers' name of a layer, by each of its names
    # the kernels of a layer that a file stores fused, in the order of their rows
    fused: Mapping[str, tuple[Entry, ...]]
    own: tuple[str, ...] = ()  # the names of a user's table

    def parameter(self, layer: str, end: str) -> Entry | None:
        """Return a layer's parameter; a weight may have the layer's name without `.weight`."""
        found = self.entries.get(f"{layer}.{end}")
        return self.entries.get(layer) if found is None and end == "weight" else found


def names_of(module: nnx.Module, table: Any = None) -> ModuleNames:
    """List a module's parameters and layers; names of a user's `table` go before all others."""
    every = {entry.name: entry for entry in entries(module)}
    kernels = {entry.owner: entry for entry in every.values() if _is_kernel(module, entry)}
    whole = grouped((place, entry) for entry in kernels.values() for place in entry.fused)
    placed = {n.removesuffix(".weight"): tuple(parts) for n, parts in whole.items()}
    fused: dict[str, tuple[Entry, ...]] = {n: x for n, x in placed.items() if len(x) > 1}
    layers = dict.fromkeys((*(entry.owner for entry in every.values()), *fused))
    tables = [written_names(names, layers) for names in PUBLISHED.values()]
    users = {} if table is None else checked_table(table, layers)
    swapped: dict[str, tuple[str, ...]] = {}
    for names in (*tables, users):
        joint = {n: those for n, those in names.items() if len(those) > 1 and n not in layers}
        fused |= {
            name: tuple(kernels[one] for one in those)
            for name, those in joint.items()
            if all(one in kernels for one in those)
        }
    for name, layer in FLUX_SWAPPED.items():
        if layer in kernels and name not in layers:
            fused[name], swapped[name] = (kernels[layer],), (layer, layer)
    theirs = [_singles(names, fused) for names in (*tables, swapped)]
    all_names = _all_names(list(layers), theirs)
    for name, layer in _singles(users, fused):
        all_names |= {name: layer, name.replace(".", "_"): layer}
    return ModuleNames(every, kernels, all_names, fused, tuple(users))


def _singles(names: Mapping[str, tuple[str, ...]], fused: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs of a name in the file and its layer; a fused layer is a layer itself."""
    singles = [(name, those[0]) for name, those in names.items() if len(those) == 1]
    return singles + [(name, name) for name in names if name in fused and len(names[name]) > 1]


def _is_kernel(module: nnx.Module, entry: Entry) -> bool:
    """Check whether an entry is the weight of a Linear layer or of an ungrouped convolution."""
    if entry.axes[-2:] != (1, 0) or not entry.name.endswith(".weight"):
        return False
    owner: Any = variable_at(module, entry.path[:-1])
    return getattr(owner, "feature_group_count", 1) == 1


def _all_names(layers: list[str], tables: list[list[tuple[str, str]]]) -> dict[str, str]:
    """Map every name to its layer, except names that two layers share."""
    own = {layer: layer for layer in layers}
    old = [(layer, name) for name, layer in (pair for table in tables for pair in table)]
    processed = [(layer, name) for layer in layers if (name := _processor(layer))]
    dotted = (*wan(layers).items(), *unet(layers).items(), *old, *processed, *own.items())
    meant: dict[str, set[str]] = {}
    for layer, name in dotted:
        for written in (name, name.replace(".", "_")):
            meant.setdefault(written, set()).add(layer)
    return {name: min(those) for name, those in meant.items() if len(those) == 1} | own


def _processor(layer: str) -> str:
    """Return the name of a projection in LoRA files of diffusers before 0.22, "" for others."""
    begin, _, end = layer.removesuffix(".0").rpartition(".")
    is_one = begin and end in ("to_q", "to_k", "to_v", "to_out")
    return f"{begin}.processor.{end}_lora" if is_one else ""


# ---- weights under the names of the model's own code ---------------------------------------------


def in_our_names(
    held: Mapping[str, Any], wanted: tuple[Entry, ...], prefix: str
) -> Mapping[str, Any]:
    """Rename tensors from the names of the model's own code to diffusers' names, if needed.

    `prefix` is the prefix of the wanted names in the file; "" tries `PREFIXES`. Two tensors that
    would get the same name are refused.
    """
    clean = _without_fsdp(held)
    theirs = wan({entry.owner.removeprefix(prefix) for entry in wanted})
    ours = {}
    for entry in wanted:
        name, layer = (text.removeprefix(prefix) for text in (entry.name, entry.owner))
        if layer in theirs:
            ours[theirs[layer] + name.removeprefix(layer)] = name
    begins = (prefix,) if prefix else PREFIXES
    there = [begin for begin in begins if any(begin + name in clean for name in ours)]
    if not there:
        return held
    if others := " and ".join(f'"{begin}"' for begin in there[1:]):
        message = 'weights: loaded the tensors with prefix "%s", not with %s; prefix= chooses'
        log.warning(message, there[0], others)
    behind = [(n.removeprefix(there[0]), n) for n in clean if n.startswith(there[0])]
    return Shown(held, {prefix + ours.get(rest, rest): (clean[n], None) for rest, n in behind})


def _without_fsdp(held: Mapping[str, Any]) -> dict[str, str]:
    """Map each tensor's name without `FSDP` to its name in the file."""
    clean: dict[str, str] = {}
    for name in held:
        if (other := clean.setdefault(name.replace(FSDP, ""), name)) != name:
            rule = f"a parameter must occur once; apart from '{FSDP}' its name equals {other}"
            raise WeightsError("weights", name, rule, "remove one of them from the file")
    return clean


# ---- names of Wan and of Stability's UNets -------------------------------------------------------

_ENDS: Final = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "norm_q": "norm_q",
                "norm_k": "norm_k"}  # fmt: skip
WAN_BLOCK: Final = {
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in _ENDS.items()},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in _ENDS.items()},
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "norm2": "norm3",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "scale_shift_table": "modulation",
}
"""Wan's names inside of `blocks.<number>`."""
WAN_OUTSIDE: Final = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "scale_shift_table": "head.modulation",
    "proj_out": "head.head",
}
_WAN = re.compile(r"(blocks\.\d+\.)?(.+)")

UNET_OUTSIDE: Final = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
UNET_INSIDE: Final = {
    "resnets": {
        "norm1": "in_layers.0",
        "conv1": "in_layers.2",
        "time_emb_proj": "emb_layers.1",
        "norm2": "out_layers.0",
        "conv2": "out_layers.3",
        "conv_shortcut": "skip_connection",
    },
    "downsamplers": {"conv": "op"},
}
"""Stability's names inside of a block's parts; in attentions and upsamplers they are diffusers'."""
UNET_MIDDLE: Final = {
    ("mid_block", "resnets", 0): "middle_block.0",
    ("mid_block", "attentions", 0): "middle_block.1",
    ("mid_block", "resnets", 1): "middle_block.2",
}
_UNET = re.compile(
    r"(?P<block>mid_block|(?:down|up)_blocks\.\d+)\."
    r"(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<i>\d+)\.(?P<rest>.+)"
)
Part = tuple[str, str, int]  # block, kind and index: ("down_blocks.1", "resnets", 0)


def wan(layers: Iterable[str]) -> dict[str, str]:
    """Map diffusers' names of layers to Wan's names, if these differ."""
    named = {}
    for layer in layers:
        if found := _WAN.fullmatch(layer):
            block, rest = found[1] or "", found[2]
            if theirs := (WAN_BLOCK if block else WAN_OUTSIDE).get(rest):
                named[layer] = block + theirs
    return named


def unet(layers: Iterable[str]) -> dict[str, str]:
    """Map diffusers' names of a UNet's layers to Stability's names; {} for other models."""
    layers = tuple(layers)
    parts = {layer: found for layer in layers if (found := _UNET.fullmatch(layer))}
    held = {_part(found) for found in parts.values()}
    places = UNET_MIDDLE | dict(_numbered(held))
    named = {x: UNET_OUTSIDE[x] for x in layers if x in UNET_OUTSIDE} if held else {}
    for layer, found in parts.items():
        if (place := places.get(_part(found))) is not None:
            rest = found["rest"]
            named[layer] = f"{place}.{UNET_INSIDE.get(found['kind'], {}).get(rest, rest)}"
    return named


def _part(found: re.Match[str]) -> Part:
    return found["block"], found["kind"], int(found["i"])


def _numbered(held: set[Part]) -> Iterator[tuple[Part, str]]:
    """Yield each part with Stability's name, numbered from input to output; block 0 is `conv_in`.

    A resnet with its attention is a block, and so is a downsampler; an upsampler ends a block.
    """
    for way, theirs, number in (("down", "input_blocks", 1), ("up", "output_blocks", 0)):
        blocks = {block for block, _, _ in held if block.startswith(f"{way}_blocks")}
        for block in sorted(blocks, key=lambda block: int(block.rpartition(".")[2])):
            for i in sorted(i for other, kind, i in held if (other, kind) == (block, "resnets")):
                yield (block, "resnets", i), f"{theirs}.{number}.0"
                yield (block, "attentions", i), f"{theirs}.{number}.1"
                number += 1
            kinds = {kind for other, kind, _ in held if other == block}
            if way == "down" and "downsamplers" in kinds:
                yield (block, "downsamplers", 0), f"{theirs}.{number}.0"
                number += 1
            elif way == "up":
                behind = 2 if "attentions" in kinds else 1
                yield (block, "upsamplers", 0), f"{theirs}.{number - 1}.{behind}"
