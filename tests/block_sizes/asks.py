"""Requests that several tests share."""

from __future__ import annotations

from maxattn.block_sizes import DKV, DQ, FORWARD
from maxattn.call import Call, Role
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

V5P, V6E, CPU = Target.named("TPU v5p"), Target.named("TPU v6e"), Target.named("cpu")
TPUS = tuple(Target.named(kind) for kind in ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x"))
KEYS = (*FORWARD, *DKV, *DQ)
CROSS_LENGTHS = (1, 77, 226, 257, 300, 333, 600, 1000, 1300)


def uniform(size: int, fused: bool = False) -> FlashBlockSizes:
    """Request one size everywhere, as presets do."""
    return FlashBlockSizes(**dict.fromkeys(KEYS, size), use_fused_bwd_kernel=fused)


def call(
    q_len: int = 75600, kv_len: int | None = None, head_dim: int = 128, dtype: str = "bfloat16"
) -> Call:
    """Describe self-attention, or cross-attention if a key length is given."""
    role: Role = "self" if kv_len is None else "cross"
    return Call(1, q_len, kv_len or q_len, 4, 4, head_dim, dtype, role=role)
