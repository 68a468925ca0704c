"""CuTe's packages, which come with fa4-jax, imported whole by one thread.

Programs may be compiled in several threads at a time. The packages import each other in circles,
and Python hands half of such a package to a thread that asks for it meanwhile.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock

PACKAGES = ("cutlass", "cutlass.cute", "cutlass.utils", "cutejax", "fa4_jax.cute.cute_dsl_utils")
_LOCK = RLock()


def import_cute() -> None:
    """Import them; threads that come meanwhile wait."""
    with _LOCK:
        for name in PACKAGES:
            import_module(name)
