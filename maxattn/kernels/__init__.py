"""The registry: one line a kernel. A new kernel is one new file and one line here."""

from __future__ import annotations

from maxattn.kernels.base import Kernel
from maxattn.kernels.dot_product import DotProduct
from maxattn.kernels.flash import Flash
from maxattn.kernels.memory_efficient import MemoryEfficient

KERNELS: dict[str, type] = {
    "dot_product": DotProduct,
    "memory_efficient": MemoryEfficient,
    "flash": Flash,
}

__all__ = ["KERNELS", "DotProduct", "Flash", "Kernel", "MemoryEfficient"]
