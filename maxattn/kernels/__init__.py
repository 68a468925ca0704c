"""The registry: one line a kernel. A new kernel is one new file and one line here."""

from __future__ import annotations

from maxattn.kernels.base import Kernel
from maxattn.kernels.cudnn import Cudnn
from maxattn.kernels.cudnn_flash_te import CudnnFlashTe
from maxattn.kernels.dot_product import DotProduct
from maxattn.kernels.flash import Flash
from maxattn.kernels.memory_efficient import MemoryEfficient
from maxattn.kernels.tokamax_flash import TokamaxFlash

KERNELS: dict[str, type] = {
    "dot_product": DotProduct,
    "memory_efficient": MemoryEfficient,
    "flash": Flash,
    "tokamax_flash": TokamaxFlash,
    "cudnn": Cudnn,
    "cudnn_flash_te": CudnnFlashTe,
}

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
