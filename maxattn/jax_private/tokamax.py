"""Where tokamax keeps its splash attention.

In tokamax 0.0.12 to 0.0.17 the functions take the same arguments. What differs is inside: 0.0.17
leaves out tiles whose segment ids cannot meet, and with segment ids its backward sums dQ's parts in
three buffers of the queries' dtype.
"""

from __future__ import annotations

from typing import Any


def library() -> Any:
    """Import the module of tokamax's splash kernels; only a call of the kernel needs it."""
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel

    return splash_attention_kernel
