"""cuDNN's attention through the private primitives of jax 0.10.2 to 0.12.

The public `jax.nn.dot_product_attention` rounds the LSE to the output's dtype, drops its gradient,
and refuses training at lengths that cuDNN can do; its primitives do none of that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def _module() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def cudnn_forward(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T] float32).

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16.
        lengths: real keys of each batch row, int32 [B], 1 or more; None: all.
        causal: allow `key <= query`.
        window: with causal, keys each query sees, its own included.
        scale: multiplies the scores.
    """
    bind = _module()._dot_product_attention_fwd_p_wrapper.bind
    out, lse = bind(
        *_operands(q, k, v, lengths), is_training=True, **_settings(lengths, causal, window, scale)
    )
    return out, lse


def cudnn_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    lengths: Array | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) from a given output and LSE; arguments as for `cudnn_forward`."""
    bind = _module()._dot_product_attention_bwd_p_wrapper.bind
    settings = _settings(lengths, causal, window, scale)
    dq, dk, dv = bind(*_operands(q, k, v, lengths), lse, out, dout, **settings)
    return dq, dk, dv


def _operands(q: Array, k: Array, v: Array, lengths: Array | None) -> tuple[Array, ...]:
    none = jnp.zeros(0, q.dtype)
    if lengths is None:
        return (q, k, v, *(none,) * 7)
    queries = jnp.full(lengths.shape, q.shape[1], jnp.int32)
    return (q, k, v, none, queries, lengths, *(none,) * 4)


def _settings(
    lengths: Array | None, causal: bool, window: int | None, scale: float
) -> dict[str, Any]:
    kinds = _module().MaskType
    plain, padded = (
        (kinds.CAUSAL, kinds.PADDING_CAUSAL) if causal else (kinds.NO_MASK, kinds.PADDING)
    )
    settings = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": plain if lengths is None else padded,
        "layout": _module().AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if jax.__version_info__ >= (0, 12):
        settings["score_mod"] = None
    return settings
