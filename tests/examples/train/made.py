"""Small data folders and settings for training Wan 2.1 and SDXL as they are, only tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flux.settings import Settings as Flux1
from sdxl.settings import Settings as Sdxl
from train import shards
from wan.settings import Settings as Wan21

WAN = {
    "sizes": "wan-2.1-t2v-1.3b",
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 16,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 6,
    "freq_dim": 8,
    "dtype": "float32",
}
I2V = WAN | {"sizes": "wan-2.1-i2v-14b", "in_channels": 12, "image_dim": 5, "added_kv_proj_dim": 24}
UNET = {
    "block_out_channels": [4, 8, 8],
    "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 1],
    "attention_head_dim": [1, 2, 2],
    "cross_attention_dim": 6,
    "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 29,
    "norm_num_groups": 2,
    "dtype": "float32",
}
FLUX = {
    "sizes": "flux.1-dev",
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "axes_dims_rope": [2, 2, 4],
    "num_layers": 2,
    "num_single_layers": 2,
    "in_channels": 16,
    "joint_attention_dim": 6,
    "pooled_projection_dim": 5,
    "dtype": "float32",
}
SHAPES = {
    "flux": {"latents": (4, 4, 8), "text": (3, 6), "pooled": (5,)},
    "wan": {"latents": (4, 2, 4, 4), "text": (3, 6)},
    "i2v": {"latents": (4, 2, 4, 4), "text": (3, 6), "image": (5, 5), "condition": (8, 2, 4, 4)},
    "sdxl": {"latents": (4, 8, 8), "text": (3, 6), "pooled": (5,), "time_ids": (6,)},
}
TRAINING = {
    "steps": 4,
    "batch_size": 4,
    "warmup_steps": 0,
    "learning_rate": 3e-3,
    "checkpoint_every": 2,
    "log_every": 1,
    "ema_decay": 0.5,
    "tensorboard": False,
    "export": False,
}


def drawn(kind: str, count: int, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Draw random examples; `changes` gives other shapes, None leaves an array out."""
    shapes = {name: shape for name, shape in (SHAPES[kind] | changes).items() if shape is not None}
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal((count, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def folder(path: Path, kind: str, count: int = 4, empty: bool = True, **changes: Any) -> str:
    """Write a folder of random examples, three a shard."""
    examples = drawn(kind, count, **changes)
    said = {
        f"negative_{n}": np.full((1, *examples[n].shape[1:]), 0.5, np.float32)
        for n in ("text", "pooled")
        if n in examples
    }
    return str(
        shards.write(path, [examples], said if empty else None, model=kind, per_shard=3).folder
    )


def wan(
    path: Path, model: dict[str, Any] | None = None, data: str | None = None, **training: Any
) -> Wan21:
    """Make the settings of a tiny Wan 2.1 that trains in `path`."""
    said = TRAINING | {"output_dir": str(path)} | training
    return Wan21(**{"model": model or WAN, "data": {"folder": data}, "training": said})


def sdxl(
    path: Path, data: str | None = None, model: dict[str, Any] | None = None, **training: Any
) -> Sdxl:
    """Make the settings of a tiny SDXL UNet that trains in `path`."""
    said = TRAINING | {"output_dir": str(path)} | training
    return Sdxl(**{"model": UNET | (model or {}), "data": {"folder": data}, "training": said})


def flux(
    path: Path, model: dict[str, Any] | None = None, data: str | None = None, **training: Any
) -> Flux1:
    """Make the settings of a tiny Flux.1 that trains in `path`."""
    said = TRAINING | {"output_dir": str(path)} | training
    return Flux1(**{"model": model or FLUX, "data": {"folder": data}, "training": said})
