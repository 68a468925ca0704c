"""Small data folders and settings for training Wan 2.1, Flux.1 and SDXL, all with tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from maxattn_examples.flux.settings import Settings as Flux1
from maxattn_examples.flux.task import FluxTask
from maxattn_examples.sdxl.settings import Settings as Sdxl
from maxattn_examples.sdxl.task import SdxlTask
from maxattn_examples.train.data import LatentFolder, write
from maxattn_examples.train.loop import Training
from maxattn_examples.wan.settings import Settings as Wan21
from maxattn_examples.wan.task import WanTask

WAN = {
    "sizes": "wan-2.1-t2v-1.3b", "num_attention_heads": 2, "attention_head_dim": 12,
    "num_layers": 2, "ffn_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 6,
    "freq_dim": 8, "dtype": "float32",
}  # fmt: skip
I2V = WAN | {"sizes": "wan-2.1-i2v-14b", "in_channels": 12, "image_dim": 5, "added_kv_proj_dim": 24}
UNET = {
    "block_out_channels": [4, 8, 8], "layers_per_block": 1,
    "transformer_layers_per_block": [1, 1, 1], "attention_head_dim": [1, 2, 2],
    "cross_attention_dim": 6, "addition_time_embed_dim": 4,
    "projection_class_embeddings_input_dim": 29, "norm_num_groups": 2, "dtype": "float32",
}  # fmt: skip
FLUX = {
    "sizes": "flux.1-dev", "num_attention_heads": 2, "attention_head_dim": 8,
    "axes_dims_rope": [2, 2, 4], "num_layers": 2, "num_single_layers": 2, "in_channels": 16,
    "joint_attention_dim": 6, "pooled_projection_dim": 5, "dtype": "float32",
}  # fmt: skip
SHAPES = {
    "flux": {"latents": (4, 4, 8), "text": (3, 6), "pooled": (5,)},
    "wan": {"latents": (4, 2, 4, 4), "text": (3, 6)},
    "i2v": {"latents": (4, 2, 4, 4), "text": (3, 6), "image": (5, 5), "condition": (8, 2, 4, 4)},
    "sdxl": {"latents": (4, 8, 8), "text": (3, 6), "pooled": (5,), "time_ids": (6,)},
}
TRAINING = {
    "steps": 4, "batch_size": 4, "warmup_steps": 0, "learning_rate": 3e-3, "checkpoint_every": 2,
    "log_every": 1, "ema_decay": 0.5, "tensorboard": False, "export": False,
}  # fmt: skip
TASKS: dict[type, Any] = {Wan21: WanTask, Sdxl: SdxlTask, Flux1: FluxTask}


def drawn(kind: str, count: int, seed: int = 0, **changes: Any) -> dict[str, np.ndarray]:
    """Draw random examples; `changes` gives other shapes, None leaves an array out."""
    shapes = {name: shape for name, shape in (SHAPES[kind] | changes).items() if shape is not None}
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal((count, *shape)) for name, shape in shapes.items()}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def folder(path: Path, kind: str, count: int = 4, empty: bool = True, **changes: Any) -> str:
    """Write a folder of random examples, three per shard."""
    examples = drawn(kind, count, **changes)
    shapes = {n: (1, *examples[n].shape[1:]) for n in ("text", "pooled") if n in examples}
    texts = {f"negative_{n}": np.full(shape, 0.5, np.float32) for n, shape in shapes.items()}
    made = write(path, [examples], texts if empty else None, model=kind, per_shard=3)
    return str(made.folder)


def batch_of(data: str, count: int = 4) -> dict[str, Any]:
    """Return an endless iterator over one batch, a folder's first four examples."""
    source = LatentFolder(data)
    return {n: jnp.stack([source[i % 4][n] for i in range(count)]) for n in source.shapes}


def _sections(path: Path, model: dict[str, Any], data: str | None, training: Any) -> dict[str, Any]:
    training = TRAINING | {"output_dir": str(path)} | training
    return {"model": model, "data": {"folder": data}, "training": training}


def wan(
    path: Path, model: dict[str, Any] | None = None, data: str | None = None, **training: Any
) -> Wan21:
    """Make the settings of a tiny Wan 2.1 that trains in `path`."""
    return Wan21(**_sections(path, model or WAN, data, training))


def sdxl(
    path: Path, model: dict[str, Any] | None = None, data: str | None = None, **training: Any
) -> Sdxl:
    """Make the settings of a tiny SDXL UNet that trains in `path`; `model` changes its sizes."""
    return Sdxl(**_sections(path, UNET | (model or {}), data, training))


def flux(
    path: Path, model: dict[str, Any] | None = None, data: str | None = None, **training: Any
) -> Flux1:
    """Make the settings of a tiny Flux.1 that trains in `path`."""
    return Flux1(**_sections(path, model or FLUX, data, training))


def begin(settings: Any, mesh: Any = None) -> Training:
    """Make the training that the command runs for these settings; without a mesh on one device."""
    return Training(TASKS[type(settings)].of(settings), mesh)


def losses(path: Path, step: int) -> list[float]:
    """Read the losses up to a checkpoint of a run."""
    facts = path / "checkpoints" / str(step) / "facts" / "metadata"
    return json.loads(facts.read_text())["losses"]
