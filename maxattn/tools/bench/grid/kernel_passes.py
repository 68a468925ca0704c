"""Both passes of a kernel as functions of arrays, as they are timed.

Lengths and ids of a mask are arguments, as in a model: what is prepared of them counts.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels import Kernel
from maxattn.kernels.base import Inputs, Rows
from maxattn.masks import Mask


def forward(kernel: Kernel, q: Array, k: Array, v: Array, dout: Array, mask: Mask) -> Any:
    """Return the output and the LSE; the output's gradient is not read."""
    return tuple(kernel.forward(Inputs(q, k, v, mask=mask)))


def backward(kernel: Kernel, *arrays: Any) -> Any:
    """Return dq, dk and dv in the dtypes of q, k and v, from what `forward` took and gave."""
    q, k, v, dout, mask, out, lse = arrays
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    dq, dk, dv, _ = kernel.backward(Inputs(q, k, v, mask=mask), rows)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype)
