"""maxattn: attention for diffusion transformers in Flax NNX. One YAML line picks the kernel and the parallelism."""

from __future__ import annotations

from maxattn import masks
from maxattn.attention import attention
from maxattn.config import AttentionConfig
from maxattn.plan import Call, Plan, Reason, Target, plan

__all__ = ["AttentionConfig", "Call", "Plan", "Reason", "Target", "attention", "masks", "plan"]
__version__ = "0.1.0"
