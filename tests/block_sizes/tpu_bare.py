"""What the child compiles through the libraries' own public splash kernels, as other projects call
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def problem(
    case: dict, spec: Callable[..., Any], mesh: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function to compile, and its operands: [N, T, H] of one batch row, segment ids
    where masked.

    Args:
        case: kernel, q_len, kv_len (already padded), heads, head_dim, dtype, mask ("full" or
            "padding"), training, sizes with the keys that the library's own class takes.
        spec: makes an operand of a shape and dtype.
        mesh: not used; one device.
    """
    t, s, n, h = (case[key] for key in ("q_len", "kv_len", "heads", "head_dim"))
    library, kernel = (_tokamax if case["kernel"] == "tokamax_flash" else _splash)(case, t, s, n)
    padded = case["mask"] == "padding"
    q, k = (spec((n, length, h), case["dtype"]) for length in (t, s))
    ids = spec((t,), "int32"), spec((s,), "int32")

    def forward(q: Any, k: Any, v: Any, q_ids: Any, kv_ids: Any) -> Any:
        return kernel(q, k, v, library.SegmentIds(q_ids, kv_ids) if padded else None)

    def gradients(q: Any, k: Any, v: Any, *ids: Any) -> Any:
        return jax.grad(lambda *x: forward(*x, *ids).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    return gradients if case["training"] else forward, (q, k, k, *ids)


def _splash(case: dict, t: int, s: int, n: int) -> tuple[Any, Any]:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.FullMask((t, s))] * n)
    sizes = library.BlockSizes(**case["sizes"])
    return library, library.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)


def _tokamax(case: dict, t: int, s: int, n: int) -> tuple[Any, Any]:
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as library,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    config = library.SplashConfig(**case["sizes"])
    return library, library.make_splash_mha(masks.FullMask((t, s)), config=config, q_seq_shards=1)
