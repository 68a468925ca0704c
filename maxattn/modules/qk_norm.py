"""Norms of queries and keys, between their projection and the rotary embedding.

Statistics, scales and results are float32 in every compute dtype. Queries and keys are rounded to
the compute dtype once, after they are rotated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn.modules import checks
from maxattn.sharding import on_axes

QK_NORMS = ("rms_norm", "rms_norm_across_heads", "zero_centred_rms_norm", "layer_norm")


class ZeroCentredRMSNorm(nnx.Module):
    """Norm by the root of the mean square: y = x / sqrt(mean(x^2) + eps) * (1 + scale).

    Args:
        channels: size of the last axis.
        epsilon: added to the mean square.
        param_dtype: dtype of the scale, which starts at 0; 1 is added to it in float32.
        scale_metadata: the mesh axes of the scale.
    """

    def __init__(
        self, channels: int, *, epsilon: float, param_dtype: Any, scale_metadata: Any
    ) -> None:
        self.num_features, self.epsilon = channels, epsilon
        self.scale = nnx.Param(jnp.zeros((channels,), param_dtype), **scale_metadata)

    def __call__(self, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
        x = jnp.asarray(x, jnp.float32)
        mean = jnp.mean(x * x, axis=-1, keepdims=True)
        factor = jnp.expand_dims(self.factor(), tuple(range(x.ndim - 1)))
        return x * (jax.lax.rsqrt(mean + self.epsilon) * factor)

    def factor(self) -> Float[Array, " C"]:
        return 1.0 + self.scale.get_value().astype(jnp.float32)


QKNorm = nnx.RMSNorm | nnx.LayerNorm | ZeroCentredRMSNorm


def make_qk_norm(
    kind: str | None,
    heads: int,
    dim_head: int,
    eps: float,
    *,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> QKNorm | None:
    """Build the norm of the queries or of the keys; return None if `kind` is None.

    rms: y = x / sqrt(mean(x^2) + eps) * scale, or * (1 + scale) if zero-centred
    layer: y = (x - mean(x)) / sqrt(var(x) + eps) * scale + bias

    "rms_norm_across_heads" is over all heads * H channels of a token, so tensor parallelism needs a
    sum over devices; every other norm is over the H channels of each head. `rngs` is required by
    the layers, though their initial values are constant.
    """
    checks.optional_name("qk_norm", kind, QK_NORMS)
    if kind is None:
        return None
    is_across = kind == "rms_norm_across_heads"
    width = heads * dim_head if is_across else dim_head
    axis = on_axes("tensor" if is_across else None, dims=(width,))
    how: dict[str, Any] = {"epsilon": eps, "param_dtype": param_dtype, "scale_metadata": axis}
    if kind == "zero_centred_rms_norm":
        return ZeroCentredRMSNorm(dim_head, **how)
    how |= {"dtype": jnp.float32, "rngs": rngs}
    if kind == "layer_norm":
        # The one-pass variance E[x^2] - E[x]^2 cancels where the mean is large.
        return nnx.LayerNorm(dim_head, use_fast_variance=False, bias_metadata=axis, **how)
    return nnx.RMSNorm(width, **how)


def normalise(norm: QKNorm | None, x: Float[Array, "... C"]) -> Float[Array, "... C"]:
    """Normalise the last axis in float32; return x unchanged if norm is None."""
    return x if norm is None else norm(x)


def scale_of(norm: QKNorm) -> Float[Array, " C"] | None:
    """Return the factors [C] that a norm applies after its statistics, or None if it has none."""
    if isinstance(norm, ZeroCentredRMSNorm):
        return norm.factor()
    return None if norm.scale is None else norm.scale.get_value()
