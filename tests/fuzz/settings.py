"""Drawn configs of attention: kernels, meshes, and the settings that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from random import Random
from typing import Any

from tests.fuzz.case import Machine

ON_CPU = ("dot_product", "memory_efficient", "flash", "tokamax_flash", "tpu_flash", "auto")
ON_GPU = ("flash", "flash", "cudnn", "cudnn_flash_te", "tokamax_flash", "auto", "memory_efficient")
BLOCKS = (
    "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
    "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
)  # fmt: skip
STRATEGIES = ("all_gather", "ring", "ring", "ulysses", "ulysses_ring", "ulysses_ring", "auto")
POLICIES = ("NONE", "FULL", "SAVE_ATTENTION", "SAVE_ATTENTION_AND_MATMUL", "MATMUL_WITHOUT_BATCH")
AXES = ("data", "fsdp", "context", "tensor")
Axes = dict[str, int]
CHUNKS = {"query_chunk_size": (1, 3, 16, 64, 200), "key_chunk_size": (2, 7, 32, 128)}
# Settings that change no result.
NEUTRAL = {
    "split_head_dim": (True, False), "float32_qk_product": (True, False), "use_base2_exp": (True,),
    "enable_jax_named_scopes": (True,), "fallback": ("error", "warn", "allow"),
    "deterministic": (True,),
}  # fmt: skip
OF_STRATEGIES = {
    "ulysses_shards": (1, 2, 3, 4),
    "ulysses_attention_chunks": (1, 2, 3),
    "ring_direction": ("one_way", "both_ways"),
}


def config_text(settings: Mapping[str, Any]) -> str:
    """Format a config as Python."""
    words = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return f"config = ma.AttentionConfig({words})\n"


def mesh_text(axes: Axes | None) -> str:
    """Format the mesh over the first devices, if there is one."""
    count = prod((axes or {}).values())
    return "" if axes is None else f"mesh = config.make_mesh(jax.devices()[:{count}])\n"


def draw_axes(rng: Random, devices: int) -> Axes:
    """Draw sizes of axes with at most the available devices; context is mostly largest."""
    axes: Axes = {}
    for axis in ("context", *rng.sample(AXES, 4)):
        room = devices // prod(axes.values())
        size = rng.choice([1, 1, 2, 2, 3, 4, 6, 8] if axis == "context" else [1, 1, 1, 2, 2, 3, 4])
        if axis not in axes and size <= room:
            axes[axis] = size
    return axes


def draw_settings(rng: Random, machine: Machine, axes: Axes | None = None) -> dict[str, Any]:
    """Draw a kernel that runs here, on a mesh also a strategy, and settings of both."""
    kernel = rng.choice(ON_GPU if machine.platform == "gpu" else ON_CPU)
    if kernel == "tokamax_flash" and "tokamax" not in machine.packages:
        kernel = "flash"
    settings: dict[str, Any] = {"attention": kernel}
    if kernel == "memory_efficient":
        settings = {"attention": "dot_product", "use_memory_efficient_attention": True}
        settings |= draw_some(rng, CHUNKS, 0.7)
    if "flash" in kernel and machine.platform == "cpu" and rng.random() < 0.4:
        settings["flash_block_sizes"] = draw_blocks(rng, (128, 128, 256, 512, 100, 8))
    settings |= draw_some(rng, NEUTRAL, 0.15)
    if axes is not None:
        settings |= {"context_parallel": rng.choice(STRATEGIES), "ici_data_parallelism": 1}
        settings |= {f"ici_{axis}_parallelism": size for axis, size in axes.items() if size > 1}
        settings |= draw_some(rng, OF_STRATEGIES, 0.35)
    return settings


def draw_some(rng: Random, choices: Mapping[str, Sequence[Any]], chance: float) -> dict[str, Any]:
    """Draw which settings are set, each with its probability, and their values."""
    return {key: rng.choice(values) for key, values in choices.items() if rng.random() < chance}


def draw_blocks(rng: Random, sizes: Sequence[int]) -> dict[str, Any]:
    """Draw some block sizes."""
    is_fused = draw_some(rng, {"use_fused_bwd_kernel": (True, False)}, 0.5)
    return draw_some(rng, dict.fromkeys(BLOCKS, sizes), 0.5) | is_fused
