"""The arithmetic of kernels in plain JAX: scores, softmax, and the gradients of both.

    S = scale * q k^T + bias        P = exp(S - lse)        out = P v
    dP = dout v^T                   D = sum(dout * out) - dlse
    dS = P * (dP - D)               dq = scale * dS k       dk = scale * dS^T q       dbias = dS

Heads are split as [K, G]: G = N / K query heads share one key head. Arrays are [B, K, G, T, H] and
[B, K, S, H], so that every matmul is a plain batched matmul. Statistics are float32 for operands of
any dtype.

Source: Dao et al., FlashAttention-2 (arXiv 2307.08691), section 3.1, with the gradient of the LSE
added.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

NEG_INF = float("-inf")
# In the backward, the LSE of a query that sees no key: exp(s - BIG_LSE) is 0, and s - BIG_LSE does
# not overflow float32.
BIG_LSE = 1e30
LN2, LOG2E = 0.6931471805599453, 1.4426950408889634  # of kernels that compute exp2

Queries = Float[Array, "B K G T H"]
Keys = Float[Array, "B K S H"]
Scores = Float[Array, "B K G T S"]
Stats = Float[Array, "B K G T"]


def split_queries(x: Float[Array, "B T N H"], kv_heads: int) -> Queries:
    """Move the heads before the sequence, and split them as [K, G]."""
    return rearrange(x, "B T (K G) H -> B K G T H", K=kv_heads)


def merge_queries(x: Queries) -> Float[Array, "B T N H"]:
    return rearrange(x, "B K G T H -> B T (K G) H")


def split_keys(x: Float[Array, "B S K H"]) -> Keys:
    return rearrange(x, "B S K H -> B K S H")


def merge_keys(x: Keys) -> Float[Array, "B S K H"]:
    return rearrange(x, "B K S H -> B S K H")


def split_stats(x: Float[Array, "B N T"], kv_heads: int) -> Stats:
    return rearrange(x, "B (K G) T -> B K G T", K=kv_heads)


def merge_stats(x: Stats) -> Float[Array, "B N T"]:
    return rearrange(x, "B K G T -> B (K G) T")


def split_heads(x: Any, kv_heads: int) -> Array:
    """Split axis 1 of a mask or bias [B|1, N|1, T|1, S|1] as [K, G], or as [1, 1]."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return rearrange(x, "B (K G) T S -> B K G T S", K=kv_heads)


def matmul(spec: str, a: Array, b: Array) -> Array:
    """Contract with float32 accumulation; float32 operands are not rounded before the product."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision=precision)


def scores(
    q: Queries,
    k: Keys,
    scale: float,
    bias: Array | None,
    level: Array | None,
    allowed: Bool[Array, "..."] | None,
) -> Scores:
    """Compute scale * q k^T + (bias - level) in float32, -inf where a query may not attend.

    Args:
        bias: [B|1, K|1, G|1, T|1, S|1] or None.
        level: level of the bias, [B|1, K|1, G|1, T|1, 1], or None for 0.
        allowed: bool of a bias's shape, True for allowed pairs; None if all are allowed.
    """
    # [B, K, G, T, H], [B, K, S, H] -> [B, K, G, T, S]
    s = matmul("bkgth,bksh->bkgts", q, k) * scale
    if bias is not None:
        bias = bias.astype(jnp.float32)
        s = s + (bias if level is None else bias - level)
    return s if allowed is None else jnp.where(allowed, s, NEG_INF)


def stable_exp(s: Scores, m: Stats) -> Scores:
    """Compute exp(s - m); 0 for queries whose maximum is -inf, which see no key."""
    return jnp.exp(s - jnp.where(m == NEG_INF, 0.0, m)[..., None])


def finish(m: Stats, l: Stats, acc: Queries) -> tuple[Queries, Stats]:
    """Return (out, lse) from the running maximum, the sum and the unnormalised output."""
    empty = l == 0.0
    out = acc / jnp.where(empty, 1.0, l)[..., None]
    lse = jnp.where(empty, NEG_INF, m + jnp.log(jnp.where(empty, 1.0, l)))
    return out, lse


def gradient_dtype(x: Array | jax.ShapeDtypeStruct) -> Any:
    """Return the dtype of dQ for queries `x`, or of the dK and dV that a ring sends for keys `x`.

    It is that of x, but float32 for float16: gradient_scale.py divides the gradients by a power of
    two, and what was rounded to float16 before that has lost its digits.
    """
    return jnp.float32 if x.dtype == jnp.float16 else x.dtype


def finite(lse: Array) -> Array:
    """Replace an LSE of -inf by `BIG_LSE`, with which P is 0."""
    return jnp.where(lse == NEG_INF, BIG_LSE, lse)


def row_gradient(
    out: Queries, dout: Queries, lse: Stats, dlse: Stats
) -> tuple[Stats, Stats, Queries]:
    """Return (finite lse, D = sum(dout * out) - dlse, dout); dout is 0 if a query sees no key."""
    empty = lse == NEG_INF
    dout = jnp.where(empty[..., None], 0.0, dout.astype(jnp.float32))
    delta = jnp.sum(dout * out.astype(jnp.float32), axis=-1) - jnp.where(empty, 0.0, dlse)
    return jnp.where(empty, BIG_LSE, lse), delta, dout


def tile_gradient(
    q: Queries, k: Keys, v: Keys, s: Scores, lse: Stats, delta: Stats, dout: Queries, scale: float
) -> tuple[Queries, Keys, Keys, Scores]:
    """Compute a tile's part of (dq, dk, dv, dS) in float32 from the queries' final LSE."""
    p = jnp.exp(s - lse[..., None])
    # [B, K, G, T, S], [B, K, G, T, H] -> [B, K, S, H]
    dv = matmul("bkgts,bkgth->bksh", p.astype(v.dtype), dout.astype(v.dtype))
    # [B, K, G, T, H], [B, K, S, H] -> [B, K, G, T, S]
    dp = matmul("bkgth,bksh->bkgts", dout.astype(v.dtype), v)
    # A finite number of a hidden key may overflow in dP.
    ds = jnp.where(p == 0.0, 0.0, p * (dp - delta[..., None]))
    dq = matmul("bkgts,bksh->bkgth", ds.astype(k.dtype), k) * scale
    dk = matmul("bkgts,bkgth->bksh", ds.astype(q.dtype), q) * scale
    return dq, dk, dv, ds


def tile_tangent(
    s: Scores, ds: Scores, lse: Stats, v: Keys, dv: Keys | None, state: tuple[Stats, Stats, Queries]
) -> tuple[Stats, Stats, Queries]:
    """Add a tile's part of a tangent to (c, rowsum(P (dS - c)), (P (dS - c)) v + P dv).

    dS and dv are tangents. c is the mean of dS in the first tile where the query sees a key, and
    infinite before it. Keys with a common part add the same to all dS of a query. P dS would lose
    the other digits where it is rounded to v's dtype; in the end c cancels.
    """
    centre, total, acc = state
    p = jnp.exp(s - lse[..., None])
    seen = jnp.sum(p, axis=-1)
    mean = jnp.sum(p * ds, axis=-1) / jnp.where(seen > 0, seen, 1.0)
    centre = jnp.where((centre == jnp.inf) & (seen > 0), mean, centre)
    moved = p * (ds - known_centre(centre)[..., None])
    wide = jnp.float32 if v.dtype == jnp.float16 else v.dtype  # P dS may leave float16's range
    # [B, K, G, T, S], [B, K, S, H] -> [B, K, G, T, H]
    acc = acc + matmul("bkgts,bksh->bkgth", moved.astype(wide), v.astype(wide))
    if dv is not None:
        acc = acc + matmul("bkgts,bksh->bkgth", p.astype(v.dtype), dv)
    return centre, total + jnp.sum(moved, axis=-1), acc


def known_centre(centre: Stats) -> Stats:
    """Return the centre of `tile_tangent`, 0 for queries that have seen no key."""
    return jnp.where(centre == jnp.inf, 0.0, centre)


def score_tangent(
    q: Queries, k: Keys, dq: Queries | None, dk: Keys | None, dbias: Array | None, scale: float
) -> Array:
    """Compute the tangent of the scores, scale * (dq k^T + q dk^T) + dbias, in float32."""
    parts = [jnp.zeros((), jnp.float32)] if dbias is None else [dbias.astype(jnp.float32)]
    # [B, K, G, T, H], [B, K, S, H] -> [B, K, G, T, S]
    parts += [matmul("bkgth,bksh->bkgts", dq, k) * scale] if dq is not None else []
    parts += [matmul("bkgth,bksh->bkgts", q, dk) * scale] if dk is not None else []
    return reduce(add, parts)


def fold_like(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum a gradient over the axes along which its operand of `shape` was broadcast."""
    sizes = enumerate(zip(x.shape, shape, strict=True))
    axes = tuple(i for i, (have, want) in sizes if want == 1 and have != 1)
    return jnp.sum(x, axis=axes, keepdims=True) if axes else x


# ---- partial results -----------------------------------------------------------------------------


def merge_by_lse(
    parts: Sequence[tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Merge (out, lse) over disjoint sets of keys into float32 (out, lse) over all of them.

        lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) out_p

    If a query sees no key in a part, the query's LSE is -inf and its out is not read there. A query
    that sees no key in any part gets out 0 and LSE -inf.
    """
    outs, lses = [out.astype(jnp.float32) for out, _ in parts], [lse for _, lse in parts]
    if len(parts) == 1:
        return outs[0], lses[0]
    if len(parts) == 2:
        # The weight is used once, so XLA fuses it into the kernel that writes the output.
        first, second = (
            jnp.where(column(lse == NEG_INF), 0.0, x) for x, lse in zip(outs, lses, strict=True)
        )
        share = jax.nn.sigmoid(jnp.where(lses[1] == NEG_INF, NEG_INF, lses[1] - lses[0]))
        return first + column(share) * (second - first), jnp.logaddexp(*lses)
    # The sums go part by part, since XLA fuses these but not a sum over a stack.
    top = reduce(jnp.maximum, lses)
    safe = jnp.where(top == NEG_INF, 0.0, top)
    weights = [jnp.exp(lse - safe) for lse in lses]
    total = reduce(add, weights)
    shares = [column(w / jnp.where(total > 0, total, 1.0)) for w in weights]
    out = reduce(add, (jnp.where(w == 0, 0.0, w * x) for w, x in zip(shares, outs, strict=True)))
    return out, jnp.where(total > 0, safe + jnp.log(total), NEG_INF)


def column(x: Float[Array, "B N T"]) -> Float[Array, "B T N 1"]:
    """Reshape a statistic per query so that it broadcasts against the output."""
    return x.swapaxes(1, 2)[..., None]


def cleared(dout: Float[Array, "B T N H"], lse: Float[Array, "B N T"]) -> Float[Array, "B T N H"]:
    """Set dout to 0 for queries with an LSE of -inf."""
    return jnp.where(column(lse == NEG_INF), 0, dout).astype(dout.dtype)
