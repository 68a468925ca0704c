"""The import of CuTe's packages, which fa4-jax depends on, by one thread at a time.

Programs may be compiled in several threads. The packages import each other in circles, so that
Python could give a second thread a half imported package.
"""

from __future__ import annotations

from importlib import import_module
from threading import RLock

PACKAGES = ("cutlass", "cutlass.cute", "cutlass.utils", "cutejax", "fa4_jax.cute.cute_dsl_utils")
_LOCK = RLock()


def import_cute() -> None:
    """Import CuTe's packages; other threads wait until the import is done."""
    with _LOCK:
        for name in PACKAGES:
            import_module(name)
