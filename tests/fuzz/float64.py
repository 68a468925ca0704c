"""Attention in float64 from its definition, with bounds for the error of a computation in a dtype.

Each bound follows the roundings: of scores (float32 sums of H products), of probabilities and their
gradients (in the dtype, if a kernel passes them to a matmul), and of results.
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
# Sums of float32 err less than their worst case; a half's rounding of one number reaches it.
SLACK = {"float32": 0.5, "bfloat16": 2.0, "float16": 2.0}


class Given(NamedTuple):
    """A call: float64 operands that its dtypes can represent."""

    q: Any
    k: Any
    v: Any
    allowed: Any  # [B, N, T, S]
    bias: Any
    scale: float
    dout: Any
    dlse: Any
    dtype: str
    bias_dtype: str = "float32"


class Bounded(NamedTuple):
    """The expected numbers, and the largest allowed error of each."""

    want: np.ndarray
    bound: np.ndarray


def attend(given: Given) -> dict[str, Bounded]:
    """Return out, lse and the gradients of sum(out * dout) + sum(lse * dlse)."""
    group = given.q.shape[2] // given.k.shape[2]
    # Keys that no query attends to may hold NaN, and count as 0.
    k, v = (np.repeat(np.where(np.isfinite(x), x, 0.0), group, axis=2) for x in (given.k, given.v))
    g = given._replace(k=k, v=v)
    soft = _softmax(g)
    forward = _forward(g, soft)
    return forward | _backward(g, group, soft, forward["out"])


class _Soft(NamedTuple):
    p: np.ndarray
    off: np.ndarray  # of p
    lse: np.ndarray
    lse_off: np.ndarray


def _softmax(g: Given) -> _Soft:
    """Return probabilities and lse, with larger bounds for queries whose scores are large."""
    bias = np.zeros((1, 1, 1, 1)) if g.bias is None else g.bias
    seen = g.allowed & np.isfinite(bias)
    level = np.where(seen, bias, -np.inf).max(-1, keepdims=True)
    level = np.where(np.isfinite(level), level, 0.0)  # taken off each query's scores
    rest = np.where(seen, bias - level, 0.0)
    # [B,T,N,H], [B,S,N,H] -> [B,N,T,S]
    x = np.einsum("btnh,bsnh->bnts", g.q, g.k) * g.scale + rest
    size = np.einsum("btnh,bsnh->bnts", abs(g.q), abs(g.k)) * abs(g.scale)
    eps = F32 * (g.q.shape[3] + 8) + (0 if g.dtype == "float32" else EPS[g.dtype])
    # A scaled query is rounded to its dtype, and so are parts of it that are nearly 0.
    least = TINY[g.dtype] * abs(g.k).sum(-1).transpose(0, 2, 1)[:, :, None]  # [B,N,1,S]
    loose = size * eps + least + (abs(rest) + np.minimum(abs(level), LEVEL)) * 4 * F32
    allowed = np.broadcast_to(g.allowed & (bias != -np.inf), x.shape)
    p, top = softmax(x, allowed)
    row = (p * loose).sum(-1, keepdims=True) + F32 * (x.shape[-1] + 8 + 4 * abs(top))
    off = np.minimum(p * np.expm1(np.minimum(2 * (loose + row), 50.0)), 1.0) * allowed
    any_key, lse = allowed.any(-1), (top + level)[..., 0]
    lse_off = row[..., 0] + 8 * F32 * (abs(lse) + 1)
    return _Soft(p, off, np.where(any_key, lse, -np.inf), np.where(any_key, lse_off, 0.0))


def softmax(x: np.ndarray, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities and lse [..., 1]; for a query without keys both are zeros."""
    any_key = allowed.any(-1, keepdims=True)
    top = np.where(allowed, x, -np.inf).max(-1, keepdims=True)
    top = np.where(any_key, top, 0.0)
    e = np.where(allowed, np.exp(np.where(allowed, x - top, 0.0)), 0.0)
    total = np.where(any_key, e.sum(-1, keepdims=True), 1.0)
    return e / total, top + np.log(total)


def _forward(g: Given, soft: _Soft) -> dict[str, Bounded]:
    eps, tiny = EPS[g.dtype], TINY[g.dtype]
    out = np.einsum("bnts,bsnh->btnh", soft.p, g.v)
    off = soft.off + soft.p * (eps + F32 * (g.k.shape[1] + 8)) + tiny * (soft.p > 0)
    bound = np.einsum("bnts,bsnh->btnh", off, abs(g.v)) + eps * abs(out) + 8 * tiny
    return {"out": Bounded(out, bound), "lse": Bounded(soft.lse, soft.lse_off)}


def _backward(g: Given, group: int, soft: _Soft, out: Bounded) -> dict[str, Bounded]:
    eps, sums = EPS[g.dtype], F32 * (g.k.shape[1] + g.q.shape[1] + g.q.shape[3] + 16)
    dp = np.einsum("btnh,bsnh->bnts", g.dout, g.v)
    dp_off = np.einsum("btnh,bsnh->bnts", abs(g.dout), abs(g.v)) * sums
    delta = np.einsum("btnh,btnh->bnt", out.want, g.dout)[..., None] - g.dlse[..., None]
    delta_off = np.einsum("btnh,btnh->bnt", out.bound + sums * abs(out.want), abs(g.dout))
    ds = soft.p * (dp - delta)
    size = abs(dp) + abs(delta) + dp_off
    ds_off = soft.off * size + soft.p * (dp_off + delta_off[..., None] + 4 * F32 * size)
    ds_off = ds_off + (eps + sums) * abs(ds) + TINY[g.dtype] * (soft.p > 0)
    p_off = soft.off + (eps + sums) * soft.p + TINY[g.dtype] * (soft.p > 0)
    want = {
        "dq": _product("bnts,bsnh->btnh", ds, ds_off, g.k, g, g.scale),
        "dk": _grouped(_product("bnts,btnh->bsnh", ds, ds_off, g.q, g, g.scale), group, g),
        "dv": _grouped(_product("bnts,btnh->bsnh", soft.p, p_off, g.dout, g, 1.0), group, g),
    }
    return want if g.bias is None else want | {"dbias": _summed(ds, ds_off, g)}


def _product(how: str, a: Any, a_off: Any, b: Any, g: Given, scale: float) -> Bounded:
    """Multiply, and bound the errors from the factor and from rounding the result."""
    want = np.einsum(how, a, b) * scale
    off = np.einsum(how, a_off, abs(b)) * abs(scale)
    return Bounded(want, off + EPS[g.dtype] * abs(want) + 8 * TINY[g.dtype])


def _grouped(one: Bounded, group: int, g: Given) -> Bounded:
    """Sum over the query heads that share a key head."""
    b, s, _, h = one.want.shape
    want, off = (x.reshape(b, s, -1, group, h).sum(3) for x in one)
    return Bounded(want, off + 2 * EPS[g.dtype] * abs(want))


def _summed(ds: np.ndarray, off: np.ndarray, g: Given) -> Bounded:
    """Sum over the axes that a bias is broadcast along."""
    axes = tuple(i for i, size in enumerate(g.bias.shape) if size == 1)
    want, off = (x.sum(axes, keepdims=True) for x in (ds, off))
    return Bounded(want, off + 2 * EPS[g.bias_dtype] * abs(want) + 8 * TINY[g.bias_dtype])


def compare(name: str, got: Any, expected: Bounded, dtype: str, slack: float) -> None:
    """Raise `Wrong` for another shape, a NaN, or a number beyond its bound.

    Args:
        name: of the result.
        dtype: of the result; numbers beyond its range may be infinite.
        slack: factor of the bounds.
    """
    got, (want, bound) = np.asarray(got, np.float64), expected
    if got.shape != want.shape:
        raise Wrong(f"{name} has shape {got.shape}, expected {want.shape}")
    beyond = abs(want) + bound >= MOST[dtype]
    same, bound = (got == want) | (beyond & ~np.isnan(got)), bound * slack
    with np.errstate(invalid="ignore"):
        part = np.where(same, 0.0, abs(got - want) / (bound + 1e-300))
    part = np.where(np.isnan(part), np.inf, part)
    if part.max(initial=0.0) > 1:
        at = tuple(int(i) for i in np.unravel_index(int(part.argmax()), part.shape))
        what = f"{name}{list(at)} is {got[at]:.6g}, expected {want[at]:.6g} +- {bound[at]:.2g}"
        ends = f"'expected {want[at]:.9g} +- {bound[at]:.2g}'"
        line = f"print(np.asarray({name}, np.float64)[{at}], {ends})"
        raise Wrong(f"{what}; {float((part > 1).mean()):.0%} of {name} are wrong", line)
