"""Whether the kernel of the adaptive norm runs here."""

from __future__ import annotations

from typing import Any

from maxattn import sharding
from maxattn.modules.adaptive_layer_norm.cute import launch_of
from maxattn.modules.adaptive_layer_norm.steps import NormWork, Parts, Tokens
from maxattn.modules.norm_rope.path import checked, cute_there, may_be_spread
from maxattn.target import Target

DTYPES = ("bfloat16", "float16")
WIDE = ("float32", *DTYPES)


def has_kernel(work: NormWork, rows: tuple[Tokens, ...], parts: Parts, mesh: Any) -> bool:
    """Tell whether the kernel takes such tokens here, each device its own.

    Args:
        work: what is done to a token.
        rows: x, and the branch where there is one.
        parts: of the vectors.
        mesh: the caller's.
    """
    gpu = Target.here().device
    if not gpu.is_a("hopper") or rows[0].dtype.name not in DTYPES or not rows[0].size:
        return False
    if any(a.dtype.name not in WIDE for a in (*rows, *parts)):
        return False
    if checked() or (mesh is None and may_be_spread()) or not cute_there():
        return False
    # A block of the kernel holds the vectors of one frame: all are cut alike, or not at all.
    if len({part.shape[1] for part in parts} - {1}) > 1:
        return False
    return _is_even(rows[0], parts, mesh) and launch_of(work.eps, rows, work.vectors).fits()


def _is_even(x: Tokens, parts: Parts, mesh: Any) -> bool:
    """Say whether each device has equally many tokens, and whole frames of them."""
    shape = sharding.mesh_shape(mesh)
    batches, spans = (sharding.ways(letter, shape) for letter in "BT")
    if x.shape[0] % batches or x.shape[1] % spans:
        return False
    return spans == 1 or all(part.shape[1] == 1 for part in parts)
