"""Norm and rotary embedding of queries or keys together, in one kernel on NVIDIA GPUs.

Elsewhere `maxattn.modules.qk_norm` and `maxattn.rope` do the same, one after the other. The kernel
adds the projection's bias too, and stays in float32 from there to the result; the others round to
the compute dtype in between.
"""

from maxattn.modules.norm_rope.fused import norm_rotary
from maxattn.modules.norm_rope.joint import (
    Sequence,
    can_join,
    norm_rotary_joint,
    norm_rotary_pair,
)
from maxattn.modules.norm_rope.path import NormRopePath, path_here
from maxattn.modules.norm_rope.row import NormRopeRow, fused_row

__all__ = [
    "NormRopePath",
    "NormRopeRow",
    "Sequence",
    "can_join",
    "fused_row",
    "norm_rotary",
    "norm_rotary_joint",
    "norm_rotary_pair",
    "path_here",
]
