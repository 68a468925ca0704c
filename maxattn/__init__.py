"""maxattn: attention for diffusion transformers in Flax NNX.

One YAML line picks the kernel and the parallelism.
"""

from __future__ import annotations

from maxattn import masks, weights
from maxattn.attention import attention
from maxattn.config import AttentionConfig
from maxattn.decide import plan
from maxattn.modules import CrossAttention, FlaxAttention, JointAttention, attention_fn, swap
from maxattn.plan import Call, Plan, Reason, Target
from maxattn.remat import remat, remat_policy
from maxattn.rope import Rotary, apply_rotary, rope_1d, rope_2d, rope_3d
from maxattn.streaming import KVCache, Stream

__all__ = [
    "AttentionConfig",
    "Call",
    "CrossAttention",
    "FlaxAttention",
    "JointAttention",
    "KVCache",
    "Plan",
    "Reason",
    "Rotary",
    "Stream",
    "Target",
    "apply_rotary",
    "attention",
    "attention_fn",
    "masks",
    "plan",
    "remat",
    "remat_policy",
    "rope_1d",
    "rope_2d",
    "rope_3d",
    "swap",
    "weights",
]
__version__ = "0.2.0"
