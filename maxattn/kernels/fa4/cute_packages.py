"""The two kernels of fa4-jax for Hopper GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from maxattn.jax_private.cute import import_cute as import_cute


def library_forward() -> Any:
    """Return fa4-jax's forward kernel for Hopper GPUs."""
    import_cute()
    return import_module("fa4_jax.cute.flash_fwd_sm90").FlashAttentionForwardSm90


def library_backward() -> Any:
    """Return fa4-jax's backward kernel for Hopper GPUs."""
    import_cute()
    return import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90
