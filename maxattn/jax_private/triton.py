"""Pallas for Triton.

Deprecated since jax 0.11, in favour of kernels in Mosaic: where it is gone, XLA does what the
kernels did.
"""

from __future__ import annotations

from typing import Any

import jax


def triton_there() -> bool:
    """Say whether Pallas lowers for Triton here: newer jax asks the GPU, or an `AbstractDevice`,
    for its kind.
    """
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    if not takes_triton(getattr(jax.local_devices()[0], "compute_capability", None)):
        return False
    asks = getattr(triton, "get_gpu_info", None)
    if asks is None:
        return True
    try:
        asks()
    except ValueError:
        return False
    return True


def takes_triton(capability: str | None) -> bool:
    """Say whether XLA compiles Triton's kernels for such a GPU: NVIDIA's from Ampere (8.0) on; None
    is no GPU's.
    """
    return capability is None or (
        capability.replace(".", "", 1).isdecimal() and float(capability) >= 8.0
    )


def triton_params(warps: int) -> Any:
    """Make the parameters of a Pallas kernel for Triton, a program of which runs on so many warps
    of 32 threads.
    """
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps)


def triton_split(x: Any) -> tuple[Any, Any]:
    """Split [..., 2] into its two parts inside of such a kernel."""
    a, b = jax.lax.split(x, (1, 1), axis=x.ndim - 1)
    return a.reshape(x.shape[:-1]), b.reshape(x.shape[:-1])
