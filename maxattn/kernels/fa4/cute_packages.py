"""CuTe's packages, which come with fa4-jax, imported whole by one thread.

Programs may be compiled in several threads at a time. The packages import each other in circles,
and Python hands half of such a package to a thread that asks for it meanwhile.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock
from typing import Any

PACKAGES = ("cutlass", "cutlass.cute", "cutlass.utils", "cutejax", "fa4_jax.cute.cute_dsl_utils")
_LOCK = RLock()


def import_cute() -> None:
    """Import them; threads that come meanwhile wait."""
    with _LOCK:
        for name in PACKAGES:
            import_module(name)


def library_forward() -> Any:
    """Return fa4-jax's forward kernel for Hopper GPUs."""
    import_cute()
    return import_module("fa4_jax.cute.flash_fwd_sm90").FlashAttentionForwardSm90


def library_backward() -> Any:
    """Return fa4-jax's backward kernel for Hopper GPUs."""
    import_cute()
    return import_module("fa4_jax.cute.flash_bwd_sm90").FlashAttentionBackwardSm90
