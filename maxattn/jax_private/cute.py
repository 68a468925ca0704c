"""The import of CuTe's packages, which come with fa4-jax, by one thread at a time.

Programs may be compiled in several threads. The packages import each other in circles, and Python
gives another thread such a package half imported.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock

PACKAGES = ("cutlass", "cutlass.cute", "cutlass.utils", "cutejax", "fa4_jax.cute.cute_dsl_utils")
_LOCK = RLock()


def import_cute() -> None:
    """Import the packages; other threads wait."""
    with _LOCK:
        for name in PACKAGES:
            import_module(name)
