"""cuDNN's attention through the private primitives of jax 0.10.2 to 0.12.

The public `jax.nn.dot_product_attention` rounds the LSE to the output's dtype, drops the LSE's
gradient, and refuses to train at some lengths that cuDNN supports; the primitives do none of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

QKV = tuple[Array, Array, Array]
"""q [B,T,N,H], k and v [B,S,K,H]; bfloat16 or float16."""


class CudnnMask(NamedTuple):
    """The allowed pairs."""

    # number of real keys in each batch row, int32, 1 or more; None: all keys
    lengths: Int[Array, " B"] | None
    causal: bool  # whether a query sees only `key <= query`
    window: int | None  # with causal, the number of last keys that each query sees; None: all


def cudnn_forward(
    qkv: QKV, mask: CudnnMask, scale: float, bias: Array | None = None
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T] float32).

    `scale` multiplies the scores; the bias is [B or 1, N or 1, T, S] in the dtype of q, with even T
    and S.
    """
    bind = _module()._dot_product_attention_fwd_p_wrapper.bind
    settings = _settings(mask, scale, bias is not None, False)
    out, lse = bind(*_operands(qkv, mask, bias), is_training=True, **settings)
    return out, lse


def cudnn_backward(
    qkv: QKV, out: Array, lse: Array, dout: Array, mask: CudnnMask, scale: float,
    bias: Array | None = None, has_dbias: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Return (dq, dk, dv), and with `has_dbias` dbias, which needs memory for B N T S values."""
    bind, has_bias = _module()._dot_product_attention_bwd_p_wrapper.bind, bias is not None
    settings = _settings(mask, scale, has_bias, has_bias and has_dbias)
    return tuple(bind(*_operands(qkv, mask, bias), lse, out, dout, **settings))


def _operands(qkv: QKV, mask: CudnnMask, bias: Array | None) -> tuple[Array, ...]:
    """Return q, k, v, bias, lengths of queries and keys, and empty arrays for unused features."""
    q, k, v = qkv
    none = jnp.zeros(0, q.dtype)
    given = q, k, v, none if bias is None else bias
    if mask.lengths is None:
        return (*given, *(none,) * 6)
    queries = jnp.full(mask.lengths.shape, q.shape[1], jnp.int32)
    return (*given, queries, mask.lengths, *(none,) * 4)


def _settings(mask: CudnnMask, scale: float, has_bias: bool, has_dbias: bool) -> dict[str, Any]:
    cudnn = _module()
    types, padded = cudnn.MaskType, mask.lengths is not None
    if mask.causal:
        kind = types.PADDING_CAUSAL if padded else types.CAUSAL
    else:
        kind = types.PADDING if padded else types.NO_MASK
    settings = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (has_bias, has_dbias),
        "mask_type": kind,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window,
    }
    return settings | ({"score_mod": None} if jax.__version_info__ >= (0, 12) else {})


def _module() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
