"""tokamax's backward on Hopper GPUs, with a memory fence that its dK and dV kernel lacks.

The kernel reads a step's LSE and delta from shared memory, then frees the buffer for the next
asynchronous copy. PTX requires a proxy fence between the reads and that copy. Without the fence, on
an H200 (tokamax 0.0.17, jax 0.11.2), dK and dV were wrong in some tiles, by up to 3% of their
largest entry, in one call of ten with 1,200 tokens and in half or all with 4,096. With the fence,
all calls give the same bits.

maxattn adds the fence to the Pallas module that tokamax's modules call. It does so in copies of
these modules that only maxattn uses, so that the user's tokamax is unchanged.

Source: NVIDIA, PTX ISA, async proxy; openxla/tokamax.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module, util
from threading import local
from types import ModuleType
from typing import Any

import jax

ATTENTION = "tokamax._src.ops.attention"
OPERATION, KERNEL = "pallas_mosaic_gpu_vjp", "pallas_mosaic_gpu_vjp_kernel_sm90"


@cache
def backward_module() -> Any:
    """Return a copy of tokamax's backward module in which the Hopper kernel has the fence."""
    operation, kernel = _instance(OPERATION), _instance(KERNEL)
    kernel.plgpu = Fenced(kernel.plgpu)
    operation.sm90 = kernel
    return operation


def _instance(name: str) -> Any:
    """Load a second instance of a tokamax module, separate from the one that users import."""
    found = util.find_spec(f"{ATTENTION}.{name}")
    assert found is not None and found.loader is not None, f"tokamax has no {name}"
    module: ModuleType = util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Fenced(local):
    """Pallas's Mosaic GPU module, with a fence between shared-memory reads and barrier arrivals."""

    def __init__(self, library: Any) -> None:
        self._library, self._has_read = library, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def load(self, ref: Any, *args: Any, **settings: Any) -> Any:
        """Load, and remember whether the load was from shared memory."""
        self._has_read |= jax.typeof(getattr(ref, "ref", ref)).memory_space == self._library.SMEM
        return self._library.load(ref, *args, **settings)

    def barrier_arrive(self, barrier: Any, **settings: Any) -> Any:
        """Arrive at a barrier, after a fence if shared memory was read since the last fence."""
        if self._has_read:
            import_module("tokamax._src.mosaic_gpu").fence_async_shared_cta()
        self._has_read = False
        return self._library.barrier_arrive(barrier, **settings)
