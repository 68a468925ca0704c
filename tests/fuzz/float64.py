"""Attention in float64 from its definition, and how far a computation in a dtype may be from it.

Each bound follows the roundings: of scores (float32 sums of H products), of probabilities and
their gradients (the dtype's, where a kernel feeds them to a matmul), and of what is returned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.case import Wrong

F32 = 2.0**-23
EPS = {"float32": F32, "bfloat16": 2.0**-8, "float16": 2.0**-11}
TINY = {"float32": 2.0**-100, "bfloat16": 2.0**-100, "float16": 2.0**-24}
MOST = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65504.0}
LEVEL = 2.0**8  # of a bias that is kept


class Given(NamedTuple):
    """Hold a call: float64 operands of their dtype's values, `allowed` [B, N, T, S]."""

    q: Any
    k: Any
    v: Any
    allowed: Any
    bias: Any
    scale: float
    dout: Any
    dlse: Any
    dtype: str
    bias_dtype: str = "float32"


class Held(NamedTuple):
    """Hold what is wanted and by how much each number may be off."""

    want: np.ndarray
    bound: np.ndarray


def attend(given: Given) -> dict[str, Held]:
    """Return out, lse and the gradients of sum(out * dout) + sum(lse * dlse)."""
    heads = _heads(given)
    soft = _softmax(given, heads)
    forward = _forward(given, heads, soft)
    return forward | _backward(given, heads, soft, forward["out"])


class _Heads(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    group: int


class _Soft(NamedTuple):
    p: np.ndarray
    off: np.ndarray  # of p
    lse: np.ndarray
    lse_off: np.ndarray
    spread: np.ndarray  # largest |x| of a row, for what float32 keeps of it


def _heads(g: Given) -> _Heads:
    """Repeat the key heads; keys that nobody sees may hold NaN, and count as 0."""
    group = g.q.shape[2] // g.k.shape[2]
    k, v = (np.repeat(np.where(np.isfinite(x), x, 0.0), group, axis=2) for x in (g.k, g.v))
    return _Heads(g.q, k, v, group)


def _scores(g: Given, heads: _Heads) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores and how far they may be off, a level of the bias taken off each row."""
    bias = np.zeros((1, 1, 1, 1)) if g.bias is None else g.bias
    seen = g.allowed & np.isfinite(bias)
    level = np.where(seen, bias, -np.inf).max(-1, keepdims=True)
    level = np.where(np.isfinite(level), level, 0.0)
    rest = np.where(seen, bias - level, 0.0)
    # [B,T,N,H], [B,S,N,H] -> [B,N,T,S]
    x = np.einsum("btnh,bsnh->bnts", heads.q, heads.k) * g.scale
    size = np.einsum("btnh,bsnh->bnts", abs(heads.q), abs(heads.k)) * abs(g.scale)
    eps = F32 * (g.q.shape[3] + 8) + (0 if g.dtype == "float32" else EPS[g.dtype])
    kept = np.minimum(abs(level), LEVEL)
    return x + rest, size * eps + (abs(rest) + kept) * 4 * F32


def _softmax(g: Given, heads: _Heads) -> _Soft:
    x, loose = _scores(g, heads)
    ok = np.broadcast_to(g.allowed, x.shape)
    if g.bias is not None:
        ok = ok & (g.bias != -np.inf)
    any_key = np.asarray(ok.any(-1, keepdims=True))
    top = np.where(any_key, np.where(ok, x, -np.inf).max(-1, keepdims=True, initial=-np.inf), 0.0)
    e = np.where(ok, np.exp(np.where(ok, x - top, 0.0)), 0.0)
    total = np.where(any_key, e.sum(-1, keepdims=True), 1.0)
    p = e / total
    lse = top + np.log(total)
    row = (p * loose).sum(-1, keepdims=True) + F32 * (x.shape[-1] + 8 + 4 * abs(lse))
    off = np.minimum(p * np.expm1(np.minimum(2 * (loose + row), 50.0)), 1.0) * ok
    return _Soft(p, off, *_lse(g, np.squeeze(lse, -1), any_key[..., 0], row[..., 0]), row)


def _lse(g: Given, lse: Any, any_key: Any, row: Any) -> tuple[np.ndarray, np.ndarray]:
    """Put the bias's level back; a row without keys has -inf."""
    if g.bias is not None:
        seen = g.allowed & np.isfinite(g.bias)
        level = np.where(seen, g.bias, -np.inf).max(-1)
        lse = lse + np.where(np.isfinite(level), level, 0.0)
    off = row + 8 * F32 * (abs(lse) + 1)
    return np.where(any_key, lse, -np.inf), np.where(any_key, off, 0.0)


def _forward(g: Given, heads: _Heads, soft: _Soft) -> dict[str, Held]:
    eps, tiny = EPS[g.dtype], TINY[g.dtype]
    out = np.einsum("bnts,bsnh->btnh", soft.p, heads.v)
    off = soft.off + soft.p * (eps + F32 * (g.k.shape[1] + 8)) + tiny * (soft.p > 0)
    bound = np.einsum("bnts,bsnh->btnh", off, abs(heads.v)) + eps * abs(out) + 8 * tiny
    return {"out": Held(out, bound), "lse": Held(soft.lse, soft.lse_off)}


def _backward(g: Given, heads: _Heads, soft: _Soft, out: Held) -> dict[str, Held]:
    eps, sums = EPS[g.dtype], F32 * (g.k.shape[1] + g.q.shape[1] + g.q.shape[3] + 16)
    dp = np.einsum("btnh,bsnh->bnts", g.dout, heads.v)
    dp_off = np.einsum("btnh,bsnh->bnts", abs(g.dout), abs(heads.v)) * sums
    delta = np.einsum("btnh,btnh->bnt", out.want, g.dout)[..., None] - g.dlse[..., None]
    delta_off = np.einsum("btnh,btnh->bnt", out.bound + sums * abs(out.want), abs(g.dout))
    ds = soft.p * (dp - delta)
    size = abs(dp) + abs(delta) + dp_off
    ds_off = soft.off * size + soft.p * (dp_off + delta_off[..., None] + 4 * F32 * size)
    ds_off = ds_off + (eps + sums) * abs(ds) + TINY[g.dtype] * (soft.p > 0)
    p_off = soft.off + (eps + sums) * soft.p + TINY[g.dtype] * (soft.p > 0)
    held = {
        "dq": _product("bnts,bsnh->btnh", ds, ds_off, heads.k, g, g.scale),
        "dk": _grouped(_product("bnts,btnh->bsnh", ds, ds_off, heads.q, g, g.scale), heads, g),
        "dv": _grouped(_product("bnts,btnh->bsnh", soft.p, p_off, g.dout, g, 1.0), heads, g),
    }
    return held if g.bias is None else held | {"dbias": _summed(ds, ds_off, g)}


def _product(how: str, a: Any, a_off: Any, b: Any, g: Given, scale: float) -> Held:
    """Multiply, and bound what both the factor's error and the rounding of the result give."""
    want = np.einsum(how, a, b) * scale
    off = np.einsum(how, a_off, abs(b)) * abs(scale)
    return Held(want, off + EPS[g.dtype] * abs(want) + 8 * TINY[g.dtype])


def _grouped(held: Held, heads: _Heads, g: Given) -> Held:
    """Sum over the query heads that share a key head."""
    b, s, _, h = held.want.shape
    want, off = (x.reshape(b, s, -1, heads.group, h).sum(3) for x in held)
    return Held(want, off + 2 * EPS[g.dtype] * abs(want))


def _summed(ds: np.ndarray, off: np.ndarray, g: Given) -> Held:
    """Sum over the axes that a bias is broadcast along."""
    axes = tuple(i for i, size in enumerate(g.bias.shape) if size == 1)
    want, off = (x.sum(axes, keepdims=True) for x in (ds, off))
    return Held(want, off + 2 * EPS[g.bias_dtype] * abs(want) + 8 * TINY[g.bias_dtype])


# Sums of float32 err less than their worst case; a half's rounding of one number reaches it.
SLACK = {"float32": 0.5, "bfloat16": 2.0, "float16": 2.0}


def hold(name: str, got: Any, held: Held, dtype: str, slack: float = 2.0) -> float:
    """Return the largest part of its bound that a number is off.

    Args:
        name: what it is.
        got: the numbers.
        held: what is wanted.
        dtype: of the result; numbers beyond its end may be infinite.
        slack: that the bounds are multiplied by.

    Raises:
        Wrong: for another shape, a NaN, or a number beyond its bound.
    """
    got = np.asarray(got, np.float64)
    if got.shape != held.want.shape:
        raise Wrong(f"{name} has shape {got.shape}, expected {held.want.shape}")
    beyond = abs(held.want) + held.bound >= MOST[dtype]
    same = (got == held.want) | (beyond & ~np.isnan(got))
    with np.errstate(invalid="ignore"):
        part = np.where(same, 0.0, abs(got - held.want) / (held.bound * slack + 1e-300))
    part = np.where(np.isnan(part), np.inf, part)
    worst = np.unravel_index(int(part.argmax()), part.shape) if part.size else ()
    if part.size and part[worst] > 1:
        wide = Held(held.want, held.bound * slack)
        raise _wrong(name, got, wide, tuple(int(i) for i in worst), float((part > 1).mean()))
    return float(part.max(initial=0.0))


def _wrong(name: str, got: Any, held: Held, at: tuple[int, ...], share: float) -> Wrong:
    value, want, bound = got[at], held.want[at], held.bound[at]
    what = f"{name}{list(at)} is {value:.6g}, expected {want:.6g} +- {bound:.2g}"
    line = f"print(np.asarray({name}, np.float64)[{at}], 'expected {want:.9g} +- {bound:.2g}')"
    return Wrong(f"{what}; {share:.0%} of {name} are wrong", line)
