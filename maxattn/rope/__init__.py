"""Rotary position embeddings: tables of angles, and the rotation of heads by a table."""

from maxattn.rope.apply import apply_rotary, as_rotary
from maxattn.rope.tables import STYLES, Rotary, rope_1d, rope_2d, rope_3d, rope_nd, split_3d

__all__ = [
    "STYLES",
    "Rotary",
    "apply_rotary",
    "as_rotary",
    "rope_1d",
    "rope_2d",
    "rope_3d",
    "rope_nd",
    "split_3d",
]
