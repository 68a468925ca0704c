"""maxattn: attention for diffusion transformers in Flax NNX.

One YAML line picks the kernel and the parallelism.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maxattn import errors, masks, sharding, steps, weights
    from maxattn._attention import attention
    from maxattn._plan import Plan
    from maxattn._remat import remat, remat_policy
    from maxattn.auditing import Audit, AuditSample, audit
    from maxattn.call import Call, Reason
    from maxattn.config import AttentionConfig
    from maxattn.decide import plan
    from maxattn.modules import CrossAttention, FlaxAttention, JointAttention, attention_fn, swap
    from maxattn.rope import Rotary, apply_rotary, rope_1d, rope_2d, rope_3d
    from maxattn.steps import blocks
    from maxattn.streaming import KVCache, Stream
    from maxattn.target import Target

__all__ = [
    "AttentionConfig",
    "Audit",
    "AuditSample",
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
    "audit",
    "blocks",
    "errors",
    "masks",
    "plan",
    "remat",
    "remat_policy",
    "rope_1d",
    "rope_2d",
    "rope_3d",
    "sharding",
    "steps",
    "swap",
    "weights",
]
__version__ = "0.4.0"

# Each public name is imported when it is first used, so that `maxattn --version` needs no jax.
_HOMES = {
    "_attention": "attention",
    "_plan": "Plan",
    "auditing": "Audit AuditSample audit",
    "call": "Call Reason",
    "config": "AttentionConfig",
    "decide": "plan",
    "modules": "CrossAttention FlaxAttention JointAttention attention_fn swap",
    "_remat": "remat remat_policy",
    "rope": "Rotary apply_rotary rope_1d rope_2d rope_3d",
    "steps": "blocks",
    "streaming": "KVCache Stream",
    "target": "Target",
}
_PARTS = (
    "config",
    "errors",
    "masks",
    "modules",
    "rope",
    "sharding",
    "steps",
    "streaming",
    "weights",
)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    elif name in _PARTS:
        found = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
