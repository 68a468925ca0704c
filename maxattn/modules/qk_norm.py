"""Norms of queries and keys, taken between their projection and the rotary embedding.

Statistics, scales and results are float32 whatever the compute dtype: what is rounded to it is what
the rotary embedding makes of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.errors import InputError, did_you_mean
from maxattn.sharding import on_axes

QK_NORMS = ("rms_norm", "rms_norm_across_heads", "zero_centred_rms_norm", "layer_norm")


class ZeroCentredRMSNorm(nnx.Module):
    """Norm by the root of the mean square, with a scale that is kept less 1.

    y = x / sqrt(mean(x^2) + eps) * (1 + scale)

    Args:
        channels: of the last axis.
        epsilon: added to the mean square.
        param_dtype: of the scale, which begins at 0; 1 is added to it in float32.
        scale_metadata: the mesh axes of the scale.
    """

    def __init__(
        self, channels: int, *, epsilon: float, param_dtype: Any, scale_metadata: Any
    ) -> None:
        self.num_features, self.epsilon = channels, epsilon
        self.scale = nnx.Param(jnp.zeros((channels,), param_dtype), **scale_metadata)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        """Return the normed x, in float32."""
        x = jnp.asarray(x, jnp.float32)
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        return x * (jax.lax.rsqrt(mean + self.epsilon) * self.factor())

    def factor(self) -> Float[Array, " C"]:
        """Return what multiplies the normed x: 1 + scale."""
        return 1.0 + self.scale.get_value().astype(jnp.float32)


QKNorm = nnx.RMSNorm | nnx.LayerNorm | ZeroCentredRMSNorm


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
    zero-centred rms: the same with 1 + scale
    layer: y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias

    Args:
        kind: None; "rms_norm", "zero_centred_rms_norm" or "layer_norm", over the H channels of each
            head; "rms_norm_across_heads", over all heads * H channels of a token at once, so that
            under tensor parallelism it sums over devices.
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
    if kind == "zero_centred_rms_norm":
        how: dict[str, Any] = {"epsilon": eps, "param_dtype": param_dtype}
        return ZeroCentredRMSNorm(dim_head, scale_metadata=on_axes(None), **how)
    if kind == "rms_norm_across_heads":
        return nnx.RMSNorm(heads * dim_head, scale_metadata=on_axes("tensor"), **common)
    if kind == "layer_norm":
        # The one-pass variance E[x^2] - E[x]^2 cancels where the mean is large.
        metadata = {"scale_metadata": on_axes(None), "bias_metadata": on_axes(None)}
        return nnx.LayerNorm(dim_head, use_fast_variance=False, **metadata, **common)
    return None


def normalise(norm: QKNorm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Apply a norm over the last axis, and leave its result in float32; None changes nothing."""
    return x if norm is None else norm(x)


def scale_of(norm: QKNorm) -> Float[Array, " C"] | None:
    """Return what multiplies the normed channels, or None where nothing does."""
    if isinstance(norm, ZeroCentredRMSNorm):
        return norm.factor()
    return None if norm.scale is None else norm.scale.get_value()
