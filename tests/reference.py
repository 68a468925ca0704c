"""Attention in float64 numpy, forward and gradients, from its definition, without maxattn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    """out [B,T,N,V], lse [B,N,T], and the gradients of sum(out * dout) + sum(lse * dlse)."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None


def attention64(q, k, v, allowed=None, bias=None, scale=None, dout=None, dlse=None) -> Answer:
    """Compute everything densely; `allowed` and `bias` broadcast to [B, N, T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (b, t, n, h), (s, kv_heads) = q.shape, k.shape[1:3]
    scale = h**-0.5 if scale is None else scale
    group = n // kv_heads
    # Heads before tokens from here on: numpy multiplies stacks of matrices faster than einsum does.
    q, kr, vr = (_heads_first(y) for y in (q, np.repeat(k, group, 2), np.repeat(v, group, 2)))
    x = q @ _transposed(kr) * scale  # [B,N,T,S]
    if bias is not None:
        x = x + np.asarray(bias, np.float64)
    ok = np.broadcast_to(
        np.ones((1, 1, 1, 1), bool) if allowed is None else np.asarray(allowed), (b, n, t, s)
    )
    any_key = ok.any(-1)
    top = np.where(any_key, np.where(ok, x, -np.inf).max(-1, initial=-np.inf), 0.0)
    e = np.where(ok, np.exp(np.where(ok, x - top[..., None], 0.0)), 0.0)
    total = e.sum(-1)
    p = e / np.where(any_key, total, 1.0)[..., None]
    lse = np.where(any_key, top + np.log(np.where(any_key, total, 1.0)), -np.inf)
    out = p @ vr  # [B,N,T,H]

    dout = np.zeros_like(out) if dout is None else _heads_first(np.asarray(dout, np.float64))
    dlse = np.zeros_like(lse) if dlse is None else np.asarray(dlse, np.float64)
    dp = dout @ _transposed(vr)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) + p * dlse[..., None]
    dq = ds @ kr * scale
    dk, dv = _transposed(ds) @ q * scale, _transposed(p) @ dout  # [B,N,S,H]
    dk, dv = (_heads_first(g).reshape(b, s, kv_heads, group, -1).sum(3) for g in (dk, dv))
    dbias = None
    if bias is not None:
        axes = tuple(i for i, size in enumerate(np.shape(bias)) if size == 1)
        dbias = ds.sum(axes, keepdims=True) if axes else ds
    return Answer(_heads_first(out), lse, _heads_first(dq), dk, dv, dbias)


def _heads_first(x: np.ndarray) -> np.ndarray:
    """Swap tokens and heads, [B,T,N,H] to [B,N,T,H] or back."""
    return x.swapaxes(1, 2)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def error(got, want) -> float:
    """Return the largest difference over the largest entry of `want`, or over 1e-3."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, want {want.shape}"
    finite = _finite(got, want)
    if not finite.any():
        return 0.0
    worst = np.abs(got[finite] - want[finite]).max()
    return float(worst / max(np.abs(want[finite]).max(), 1e-3))


def mean_error(got, want) -> float:
    """Return the root mean square of the differences over that of `want`, or over 1e-3.

    Between two roundings of the same numbers, the largest error varies by chance, this one hardly.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = _finite(got, want)
    if not finite.any():
        return 0.0
    off, size = (np.sqrt(np.mean(x**2)) for x in (got[finite] - want[finite], want[finite]))
    return float(off / max(size, 1e-3))


def _finite(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return which entries must be finite; a NaN is an error, though no comparison finds it."""
    finite = np.isfinite(want)
    assert (got[~finite] == want[~finite]).all(), "infinite entries differ"
    wrong = np.count_nonzero(~np.isfinite(got[finite]))
    assert not wrong, f"{wrong} of {got.size} entries are not finite, and should be"
    return finite
