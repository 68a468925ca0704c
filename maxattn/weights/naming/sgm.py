"""Stability's own names of a UNet's layers, of which diffusers has others.

Its blocks are numbered from one end to the other: residual blocks (with their attention) and
changes of resolution count alike. kohya's sd-scripts name LoRA of SDXL so.
Source: generative-models, https://github.com/Stability-AI/generative-models (openaimodel.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

WHOLE: Final = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
INSIDE: Final = {
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
"""Names inside of a part; those of attentions and upsamplers are diffusers'."""
MIDDLE: Final = {
    ("mid_block", "resnets", 0): "middle_block.0",
    ("mid_block", "attentions", 0): "middle_block.1",
    ("mid_block", "resnets", 1): "middle_block.2",
}
_PART = re.compile(
    r"(?P<block>mid_block|(?:down|up)_blocks\.\d+)\."
    r"(?P<kind>resnets|attentions|downsamplers|upsamplers)\.(?P<i>\d+)\.(?P<rest>.+)"
)
Part = tuple[str, str, int]
"""Block, kind and index: ("down_blocks.1", "resnets", 0)."""


def originals(layers: Iterable[str]) -> dict[str, str]:
    """Return Stability's names of a UNet's layers, by diffusers' names; of other models none."""
    layers = tuple(layers)
    parts = {layer: found for layer in layers if (found := _PART.fullmatch(layer))}
    held = {_part(found) for found in parts.values()}
    places = MIDDLE | dict(_numbered(held))
    named = {layer: WHOLE[layer] for layer in layers if layer in WHOLE} if held else {}
    for layer, found in parts.items():
        if (place := places.get(_part(found))) is not None:
            rest = found["rest"]
            named[layer] = f"{place}.{INSIDE.get(found['kind'], {}).get(rest, rest)}"
    return named


def _part(found: re.Match[str]) -> Part:
    return found["block"], found["kind"], int(found["i"])


def _numbered(held: set[Part]) -> Iterator[tuple[Part, str]]:
    """Number the parts of the way down, whose block 0 is the first convolution, and of the way up.

    On the way up, a change of resolution is in the last block, behind its other parts.
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
