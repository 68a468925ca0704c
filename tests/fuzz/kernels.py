"""Drawn kernels and the settings that they read."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.case import Machine

ON_CPU = ("dot_product", "memory_efficient", "flash", "tokamax_flash", "tpu_flash", "auto")
ON_GPU = ("flash", "flash", "cudnn", "cudnn_flash_te", "tokamax_flash", "auto", "memory_efficient")
BLOCKS = (
    "block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv",
    "block_kv_dkv_compute", "block_q_dq", "block_kv_dq",
)  # fmt: skip


def draw_settings(rng: Random, machine: Machine) -> dict[str, Any]:
    """Draw the settings of a config that names a kernel."""
    names = ON_GPU if machine.platform == "gpu" else ON_CPU
    kernel = rng.choice(names)
    if kernel == "tokamax_flash" and "tokamax" not in machine.packages:
        kernel = "flash"
    settings: dict[str, Any] = {"attention": kernel}
    if kernel == "memory_efficient":
        settings = {"attention": "dot_product", "use_memory_efficient_attention": True} | _chunks(
            rng
        )
    if "flash" in kernel and machine.platform == "cpu" and rng.random() < 0.4:
        settings["flash_block_sizes"] = _blocks(rng)
    return settings | _others(rng)


def _chunks(rng: Random) -> dict[str, int]:
    chunks = {
        "query_chunk_size": rng.choice([1, 3, 16, 64, 200]),
        "key_chunk_size": rng.choice([2, 7, 32, 128]),
    }
    return {key: size for key, size in chunks.items() if rng.random() < 0.7}


def _blocks(rng: Random) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        key: rng.choice([128, 128, 256, 512, 100, 8]) for key in BLOCKS if rng.random() < 0.5
    }
    return sizes | ({"use_fused_bwd_kernel": rng.random() < 0.5} if rng.random() < 0.5 else {})


def _others(rng: Random) -> dict[str, Any]:
    """Draw settings that change no result."""
    drawn = {
        "split_head_dim": rng.random() < 0.5,
        "float32_qk_product": rng.random() < 0.5,
        "use_base2_exp": True,
        "enable_jax_named_scopes": True,
        "fallback": rng.choice(["error", "warn", "allow"]),
        "deterministic": True,
    }
    return {key: value for key, value in drawn.items() if rng.random() < 0.15}
