"""AITER, AMD's fused attention, in the jax that AMD builds for ROCm."""

from __future__ import annotations

from importlib.util import find_spec

AITER = "aiter"
"""What a target's packages call it: no package of pip's has this name here."""


def aiter_in_jax() -> tuple[tuple[str, str], ...]:
    """Return (AITER, "in jax") where this jax has it; no kernel of maxattn calls it."""
    return ((AITER, "in jax"),) if find_spec("jax._src.aiter") is not None else ()
