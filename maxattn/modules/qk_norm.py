"""Norms of queries and keys, taken between their projection and the rotary embedding.

Statistics and scales are float32 whatever the compute dtype; the result is cast back.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.errors import InputError, did_you_mean
from maxattn.sharding import on_axes

QK_NORMS = ("rms_norm", "rms_norm_across_heads", "layer_norm")
QKNorm = nnx.RMSNorm | nnx.LayerNorm


def check_qk_norm(kind: str | None) -> None:
    """Refuse an unknown norm.

    Raises:
        InputError: unless `kind` is None or one of `QK_NORMS`.
    """
    if kind is not None and kind not in QK_NORMS:
        raise InputError(
            "qk_norm",
            repr(kind),
            f"it is None or one of {', '.join(QK_NORMS)}",
            did_you_mean(str(kind), QK_NORMS) or "use None for no norm",
        )


def make_qk_norm(
    kind: str | None,
    heads: int,
    dim_head: int,
    eps: float,
    *,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> QKNorm | None:
    """Build the norm of the queries or of the keys.

    rms:   y = x / sqrt(mean(x^2) + eps) * scale
    layer: y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias

    Args:
        kind: None; "rms_norm" or "layer_norm", over the H channels of each head;
            "rms_norm_across_heads", over all heads * H channels of a token at once, so that under
            tensor parallelism it sums over devices.
        heads: N for queries, K for keys.
        dim_head: H.
        eps: added to the mean square or the variance.
        param_dtype: dtype of scale and bias.
        rngs: for the initialisers, which are constant.

    Raises:
        InputError: for an unknown kind.
    """
    check_qk_norm(kind)
    common: dict[str, Any] = {
        "epsilon": eps,
        "dtype": jnp.float32,
        "param_dtype": param_dtype,
        "rngs": rngs,
    }
    if kind == "rms_norm":
        return nnx.RMSNorm(dim_head, scale_metadata=on_axes(None), **common)
    if kind == "rms_norm_across_heads":
        return nnx.RMSNorm(heads * dim_head, scale_metadata=on_axes("tensor"), **common)
    if kind == "layer_norm":
        # The one-pass variance E[x^2] - E[x]^2 cancels where the mean is large.
        metadata = {"scale_metadata": on_axes(None), "bias_metadata": on_axes(None)}
        return nnx.LayerNorm(dim_head, use_fast_variance=False, **metadata, **common)
    return None


def normalise(norm: QKNorm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Apply a norm over the last axis and keep the dtype of x; None changes nothing."""
    return x if norm is None else norm(x).astype(x.dtype)
