"""Attention modules for Flax NNX, and adapters for models with attention modules of their own."""

from maxattn.modules._swap import Swapped, SwapTable, swap
from maxattn.modules.adapters import AttentionFn, attention_fn
from maxattn.modules.adaptive_layer_norm import GatedBranch, ModulationRow, adaptive_norm, gated_sum
from maxattn.modules.cross_attention import KV, CrossAttention
from maxattn.modules.heads import attention_flat, merge_heads, split_heads
from maxattn.modules.joint_attention import JointAttention
from maxattn.modules.self_attention import FlaxAttention

__all__ = [
    "KV",
    "AttentionFn",
    "CrossAttention",
    "FlaxAttention",
    "GatedBranch",
    "JointAttention",
    "ModulationRow",
    "SwapTable",
    "Swapped",
    "adaptive_norm",
    "attention_flat",
    "attention_fn",
    "gated_sum",
    "merge_heads",
    "split_heads",
    "swap",
]
