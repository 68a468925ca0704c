"""The settings of a plan's kernel, typed, for tests that know which kernel the plan chose."""

from __future__ import annotations

from maxattn.block_sizes import BlockSizes
from maxattn.kernels.base import Kernel
from maxattn.kernels.memory_efficient import MemoryEfficient


def blocks_of(kernel: Kernel) -> BlockSizes:
    """Return the tile sizes of a kernel that has them."""
    assert kernel.blocks is not None, f"{kernel.name} takes no block sizes"
    return kernel.blocks


def memory_efficient(kernel: Kernel) -> MemoryEfficient:
    """Return the kernel, typed as the one with chunk sizes."""
    assert isinstance(kernel, MemoryEfficient), kernel.name
    return kernel
