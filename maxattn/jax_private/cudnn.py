"""cuDNN's attention through the private primitives of jax 0.10.2 to 0.12.

The public `jax.nn.dot_product_attention` rounds the LSE to the output's dtype, drops its gradient,
and refuses training at lengths that cuDNN can do; its primitives do none of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

QKV = tuple[Array, Array, Array]
"""q [B,T,N,H], k and v [B,S,K,H]; bfloat16 or float16."""


class CudnnMask(NamedTuple):
    """Say which pairs cuDNN allows.

    Args:
        lengths: real keys of each batch row, int32, 1 or more; None: all.
        causal: allow `key <= query`.
        window: with causal, keys each query sees, its own included.
    """

    lengths: Int[Array, " B"] | None
    causal: bool
    window: int | None


class CudnnRows(NamedTuple):
    """Hold what the backward is given of each query: the output, its LSE, the output's gradient."""

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B N T"]
    dout: Float[Array, "B T N H"]


class CudnnBias(NamedTuple):
    """Hold what a backward adds to the scores.

    Args:
        array: [B or 1, N or 1, T, S] in the dtype of q, or None. T and S are even.
        has_gradient: whether the gradient of it is computed too.
    """

    array: Array | None = None
    has_gradient: bool = False


NO_BIAS = CudnnBias()


def _module() -> Any:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def cudnn_forward(
    qkv: QKV, mask: CudnnMask, scale: float, bias: Array | None = None
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T] float32); `scale` multiplies the scores.

    Args:
        qkv, mask, scale: as they are named.
        bias: as the array of `CudnnBias`, or None.
    """
    bind = _module()._dot_product_attention_fwd_p_wrapper.bind
    settings = _settings(mask, scale, bias is not None, False)
    out, lse = bind(*_operands(qkv, mask, bias), is_training=True, **settings)
    return out, lse


def cudnn_backward(
    qkv: QKV, rows: CudnnRows, mask: CudnnMask, scale: float, bias: CudnnBias = NO_BIAS
) -> tuple[Array, ...]:
    """Return (dq, dk, dv), and the gradient of the bias if asked for, from a given output and LSE.

    cuDNN takes B N T S values of memory for the gradient of a bias.
    """
    bind, has_bias = _module()._dot_product_attention_bwd_p_wrapper.bind, bias.array is not None
    given, settings = (rows.lse, rows.out, rows.dout), _settings(mask, scale, has_bias, False)
    if has_bias and bias.has_gradient:
        settings = _settings(mask, scale, True, True)
    return tuple(bind(*_operands(qkv, mask, bias.array), *given, **settings))


def _operands(qkv: QKV, mask: CudnnMask, bias: Array | None) -> tuple[Array, ...]:
    """Return q, k, v, bias, lengths of queries and keys, and what cuDNN takes for nothing else."""
    q, k, v = qkv
    none = jnp.zeros(0, q.dtype)
    given = q, k, v, none if bias is None else bias
    if mask.lengths is None:
        return (*given, *(none,) * 6)
    queries = jnp.full(mask.lengths.shape, q.shape[1], jnp.int32)
    return (*given, queries, mask.lengths, *(none,) * 4)


def _settings(mask: CudnnMask, scale: float, has_bias: bool, has_dbias: bool) -> dict[str, Any]:
    settings = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (has_bias, has_dbias),
        "mask_type": _mask_type(mask),
        "layout": _module().AttentionLayout.BTNH.value,
        "sliding_window_length": mask.window,
    }
    if jax.__version_info__ >= (0, 12):
        settings["score_mod"] = None
    return settings


def _mask_type(mask: CudnnMask) -> Any:
    types = _module().MaskType
    if mask.lengths is None:
        return types.CAUSAL if mask.causal else types.NO_MASK
    return types.PADDING_CAUSAL if mask.causal else types.PADDING
