"""The kernels: attention over what one device holds. `table.py` has one row a kernel.

Importing this package imports no kernel: `KERNELS["flash"]` and `maxattn.kernels.Flash` do, when
they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from maxattn.kernels.table import TABLE, Classes

if TYPE_CHECKING:
    from maxattn.kernels.base import Kernel
    from maxattn.kernels.cudnn import Cudnn
    from maxattn.kernels.cudnn_flash_te import CudnnFlashTe
    from maxattn.kernels.dot_product import DotProduct
    from maxattn.kernels.flash import Flash
    from maxattn.kernels.memory_efficient import MemoryEfficient
    from maxattn.kernels.tokamax_flash import TokamaxFlash

KERNELS: Mapping[str, type[Kernel]] = Classes(TABLE)

__all__ = [
    "KERNELS",
    "Cudnn",
    "CudnnFlashTe",
    "DotProduct",
    "Flash",
    "Kernel",
    "MemoryEfficient",
    "TokamaxFlash",
]


def __getattr__(name: str) -> Any:
    if name == "Kernel":
        from maxattn.kernels.base import Kernel

        return Kernel
    found = [row.name for row in TABLE.values() if row.where.endswith(f":{name}")]
    if not found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return KERNELS[found[0]]
