"""Wan's own names of its layers, of which diffusers has others.

ComfyUI, lightx2v, diffusion-pipe and musubi-tuner name LoRA so.
Source: Wan 2.1's code, https://github.com/Wan-Video/Wan2.1 (wan/modules/model.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_EMBEDDER: Final = r"condition_embedder\."
RULES: Final = (
    (r"blocks\.(\d+)\.attn1\.to_([qkv])", r"blocks.\1.self_attn.\2"),
    (r"blocks\.(\d+)\.attn1\.to_out\.0", r"blocks.\1.self_attn.o"),
    (r"blocks\.(\d+)\.attn1\.(norm_[qk])", r"blocks.\1.self_attn.\2"),
    (r"blocks\.(\d+)\.attn2\.to_([qkv])", r"blocks.\1.cross_attn.\2"),
    (r"blocks\.(\d+)\.attn2\.to_out\.0", r"blocks.\1.cross_attn.o"),
    (r"blocks\.(\d+)\.attn2\.(norm_[qk])", r"blocks.\1.cross_attn.\2"),
    (r"blocks\.(\d+)\.attn2\.add_([kv])_proj", r"blocks.\1.cross_attn.\2_img"),
    (r"blocks\.(\d+)\.attn2\.norm_added_k", r"blocks.\1.cross_attn.norm_k_img"),
    (r"blocks\.(\d+)\.norm2", r"blocks.\1.norm3"),
    (r"blocks\.(\d+)\.ffn\.net\.0\.proj", r"blocks.\1.ffn.0"),
    (r"blocks\.(\d+)\.ffn\.net\.2", r"blocks.\1.ffn.2"),
    (r"blocks\.(\d+)\.scale_shift_table", r"blocks.\1.modulation"),
    (_EMBEDDER + r"time_embedder\.linear_1", "time_embedding.0"),
    (_EMBEDDER + r"time_embedder\.linear_2", "time_embedding.2"),
    (_EMBEDDER + "time_proj", "time_projection.1"),
    (_EMBEDDER + r"text_embedder\.linear_1", "text_embedding.0"),
    (_EMBEDDER + r"text_embedder\.linear_2", "text_embedding.2"),
    (_EMBEDDER + r"image_embedder\.pos_embed", "img_emb.emb_pos"),
    (_EMBEDDER + r"image_embedder\.norm1", "img_emb.proj.0"),
    (_EMBEDDER + r"image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (_EMBEDDER + r"image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (_EMBEDDER + r"image_embedder\.norm2", "img_emb.proj.4"),
    ("scale_shift_table", "head.modulation"),
    ("proj_out", "head.head"),
)
"""diffusers' name of a layer as an expression, and Wan's."""
_COMPILED: Final = tuple((re.compile(theirs), own) for theirs, own in RULES)


def originals(layers: Iterable[str]) -> dict[str, str]:
    """Return Wan's names of those layers that it names otherwise, by diffusers' names."""
    found = {}
    for layer in layers:
        for pattern, own in _COMPILED:
            if match := pattern.fullmatch(layer):
                found[layer] = match.expand(own)
    return found
