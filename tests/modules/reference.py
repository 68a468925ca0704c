"""The modules again, written apart from them: dense, naive, in numpy float64, or in jax where
autodiff is wanted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx


def params_of(module: nnx.Module, dtype: Any = np.float64) -> dict[str, Any]:
    """Return a module's parameters as nested dicts of numpy arrays."""

    def cast(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: cast(value) for key, value in node.items()}
        return np.asarray(node).astype(dtype)

    return cast(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def randomise(module: nnx.Module, seed: int = 0) -> None:
    """Give every parameter random values, so that scales of 1 and biases of 0 cannot hide a
    mistake.
    """
    rng = np.random.default_rng(seed)
    for _, param in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        noise = 0.3 * rng.standard_normal(param.get_value().shape)
        param.set_value(
            (np.asarray(param.get_value(), np.float32) + noise).astype(param.get_value().dtype)
        )


def linear(p: dict[str, Any], x: Any) -> Any:
    y = x @ p["kernel"]
    return y + p["bias"] if "bias" in p else y


def norm(
    kind: str | None, p: dict[str, Any] | None, x: Any, heads: int, eps: float, xp: Any = np
) -> Any:
    """Norm and split: [B, T, N*H] -> [B, T, N, H]."""
    b, t, inner = x.shape
    if kind is None:
        return x.reshape(b, t, heads, inner // heads)
    assert p is not None
    if kind == "rms_norm_across_heads":
        x = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * p["scale"]
    x = x.reshape(b, t, heads, inner // heads)
    if kind == "rms_norm":
        x = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * p["scale"]
    if kind == "layer_norm":
        mean = xp.mean(x, axis=-1, keepdims=True)
        var = xp.mean((x - mean) ** 2, axis=-1, keepdims=True)
        x = (x - mean) / xp.sqrt(var + eps) * p["scale"] + p["bias"]
    return x


def turn(x: Any, angles: Any, xp: Any = np) -> Any:
    """Multiply neighbouring pairs, read as complex numbers, by exp(i angle); angles [T, H/2]."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * xp.exp(1j * angles)[None, :, None, :]
    return xp.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def attend(
    q: Any,
    k: Any,
    v: Any,
    allowed: Any = None,
    bias: Any = None,
    scale: float | None = None,
    xp: Any = np,
) -> Any:
    """Attend densely: query head n reads key head n // (N / K); a row with no allowed key gives
    0.
    """
    share = q.shape[2] // k.shape[2]
    k, v = xp.repeat(k, share, axis=2), xp.repeat(v, share, axis=2)
    s = xp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    allowed = xp.ones(s.shape, bool) if allowed is None else xp.broadcast_to(allowed, s.shape)
    top = xp.max(xp.where(allowed, s, -1e30), axis=-1, keepdims=True)
    e = xp.where(allowed, xp.exp(xp.where(allowed, s, top) - top), 0.0)
    total = xp.sum(e, axis=-1, keepdims=True)
    return xp.einsum("bnts,bsnh->btnh", e / xp.where(total > 0, total, 1.0), v)


def self_attention(
    p: dict, x: Any, m: Any, angles: Any = None, allowed: Any = None, bias: Any = None, xp: Any = np
) -> Any:
    q = norm(m.qk_norm, p.get("norm_q"), linear(p["to_q"], x), m.heads, m.eps, xp)
    k = norm(m.qk_norm, p.get("norm_k"), linear(p["to_k"], x), m.kv_heads, m.eps, xp)
    v = norm(None, None, linear(p["to_v"], x), m.kv_heads, m.eps, xp)
    if angles is not None:
        q, k = turn(q, angles, xp), turn(k, angles, xp)
    out = attend(q, k, v, allowed, bias, m.scale, xp)
    return linear(p["to_out"], out.reshape(*out.shape[:2], -1))


def cross_attention(
    p: dict, x: Any, text: Any, m: Any, image: Any = None, allowed: Any = None, xp: Any = np
) -> Any:
    q = norm(m.qk_norm, p.get("norm_q"), linear(p["to_q"], x), m.heads, m.eps, xp)
    k = norm(m.qk_norm, p.get("norm_k"), linear(p["to_k"], text), m.kv_heads, m.eps, xp)
    v = norm(None, None, linear(p["to_v"], text), m.kv_heads, m.eps, xp)
    out = attend(q, k, v, allowed, None, m.scale, xp)
    if image is not None:
        ik = norm(
            m.qk_norm, p.get("norm_added_k"), linear(p["add_k_proj"], image), m.kv_heads, m.eps, xp
        )
        iv = norm(None, None, linear(p["add_v_proj"], image), m.kv_heads, m.eps, xp)
        out = out + attend(q, ik, iv, None, None, m.scale, xp)
    return linear(p["to_out"], out.reshape(*out.shape[:2], -1))
