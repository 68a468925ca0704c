"""The modules in float64: projections, norms, rotary embeddings and attention, from parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Params = Mapping[str, np.ndarray]


class Heads(NamedTuple):
    """Hold what a module computes with: N, K, H, the norm and its eps, and the scale."""

    n: int
    k: int
    h: int
    norm: str | None
    eps: float
    scale: float | None


def linear(p: Params, name: str, x: Any) -> np.ndarray:
    """Multiply by a kernel and add a bias where there is one."""
    y = x @ p[f"{name}.kernel"]
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def project(p: Params, name: str, norm: str, x: Any, how: Heads, heads: int) -> np.ndarray:
    """Project to heads and take the norm that the parameters have: [B, T, heads, H]."""
    y = linear(p, name, x)
    if how.norm == "rms_norm_across_heads" and norm:
        y = _rms(y, how.eps) * p[f"{norm}.scale"]
    y = y.reshape(*y.shape[:2], heads, how.h)
    if how.norm == "rms_norm" and norm:
        return _rms(y, how.eps) * p[f"{norm}.scale"]
    if how.norm == "layer_norm" and norm:
        centred = y - y.mean(-1, keepdims=True)
        return _rms(centred, how.eps) * p[f"{norm}.scale"] + p[f"{norm}.bias"]
    return y


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotated(x: np.ndarray, theta: float, style: str) -> np.ndarray:
    """Turn pairs of channels by t * theta ** (-2 i / H), as complex numbers."""
    h = x.shape[-1]
    angle = np.arange(x.shape[1])[:, None] * theta ** (-2 * np.arange(h // 2) / h)
    turn = np.exp(1j * angle)[None, :, None, :]
    if style == "half":
        z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def attend(q: Any, k: Any, v: Any, allowed: Any, bias: Any, how: Heads) -> np.ndarray:
    """Attend; a query without keys gives 0. Returns [B, T, N * H]."""
    k, v = (np.repeat(x, how.n // how.k, axis=2) for x in (k, v))
    # [B,T,N,H], [B,S,N,H] -> [B,N,T,S]
    x = np.einsum("btnh,bsnh->bnts", q, k) * (how.h**-0.5 if how.scale is None else how.scale)
    x = np.where(allowed, x + (0.0 if bias is None else bias), -np.inf)
    top = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
    total = e.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", e / np.where(total == 0, 1.0, total), v)
    return out.reshape(*out.shape[:2], -1)


class Inputs(NamedTuple):
    """Hold what a module is called with: states, another sequence, an image, mask and bias."""

    x: np.ndarray
    text: np.ndarray | None
    image: np.ndarray | None
    allowed: Any
    bias: Any
    theta: float | None
    style: str


def _turn(x: np.ndarray, i: Inputs) -> np.ndarray:
    return x if i.theta is None else rotated(x, i.theta, i.style)


def self_attention(p: Params, i: Inputs, how: Heads) -> np.ndarray:
    """Compute `FlaxAttention`."""
    q = _turn(project(p, "to_q", "norm_q", i.x, how, how.n), i)
    k = _turn(project(p, "to_k", "norm_k", i.x, how, how.k), i)
    v = project(p, "to_v", "", i.x, how, how.k)
    return linear(p, "to_out", attend(q, k, v, i.allowed, i.bias, how))


def cross_attention(p: Params, i: Inputs, how: Heads) -> np.ndarray:
    """Compute `CrossAttention`: queries alone are turned."""
    q = _turn(project(p, "to_q", "norm_q", i.x, how, how.n), i)
    k = project(p, "to_k", "norm_k", i.text, how, how.k)
    out = attend(q, k, project(p, "to_v", "", i.text, how, how.k), i.allowed, i.bias, how)
    if i.image is not None:
        k = project(p, "add_k_proj", "norm_added_k", i.image, how, how.k)
        out = out + attend(q, k, project(p, "add_v_proj", "", i.image, how, how.k), True, None, how)
    return linear(p, "to_out", out)


def joint_attention(p: Params, i: Inputs, how: Heads) -> np.ndarray:
    """Compute `JointAttention`: text first; both outputs one after the other, flat."""
    names = (
        ("add_q_proj", "to_q", "norm_added_q", "norm_q"),
        ("add_k_proj", "to_k", "norm_added_k", "norm_k"),
    )
    q = _turn(_both(p, *names[0], i, how, how.n), i)
    k = _turn(_both(p, *names[1], i, how, how.k), i)
    out = attend(
        q, k, _both(p, "add_v_proj", "to_v", "", "", i, how, how.k), i.allowed, i.bias, how
    )
    s = i.text.shape[1] if i.text is not None else 0
    picture, text = linear(p, "to_out", out[:, s:]), linear(p, "to_add_out", out[:, :s])
    return np.concatenate([picture.ravel(), text.ravel()])


def _both(
    p: Params, added: str, own: str, norm: str, own_norm: str, i: Inputs, how: Heads, n: int
) -> np.ndarray:
    text, x = project(p, added, norm, i.text, how, n), project(p, own, own_norm, i.x, how, n)
    return np.concatenate([text, x], axis=1)
