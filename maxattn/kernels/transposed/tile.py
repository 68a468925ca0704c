"""One tile of the forward's softmax, with keys along the sublanes.

    S^T = k q^T        P^T = exp2(S^T - m)        acc^T += v^T P^T        l += sum(P^T over keys)

Scores are transposed, so that sums and maxima over keys combine whole registers, and a query's
statistics are in one lane. m is the running maximum of the online softmax, or 0 if all scores are
known to be small (`small_scores`), since a score is at most |q| |k|. If this bound is small, exp2
of every score is far from both ends of float32's range. The results

    out = sum(exp2(s) v) / sum(exp2(s))        lse = log2(sum(exp2(s)))

then lose no digits, since floats have equal precision at every magnitude. Normalised queries and
keys, as in most diffusion transformers, are always within the bound. The kernel chooses m = 0 or
the maximum for each head and query block. In shapes, C is a number of keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from maxattn.block_sizes.sizes import SUBLANES

INNER = 256  # keys per product with V: the side of the largest matrix units
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a hidden pair: its exp2 is 0, and the difference of two scores cannot overflow."""
# 2**24 terms of 2**94 add up to 2**118, and 2**-32 of a term of 2**-94 is still a normal number.
# The largest value of V shifts both limits by its exponent.
LARGEST = 94.0


class Sums(NamedTuple):
    """The running statistics of a query block, in VMEM."""

    acc: Any  # [H, block_q], the output before its division by l
    l: Any  # [8, block_q], the sums of exp2, one per sublane
    m: Any  # [1, block_q], the maximum

    def clear(self, bounded: Any) -> None:
        """Begin a query block; if its scores are bounded, the maximum is 0."""
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)
        self.l[...] = jnp.zeros(self.l.shape, jnp.float32)
        self.m[...] = jnp.full(self.m.shape, jnp.where(bounded, 0.0, MASKED), jnp.float32)

    def result(self) -> tuple[Float[Array, "H q"], Float[Array, "1 q"]]:
        """Return the output, and the LSE in base 2; garbage for a query that saw no key."""
        l = self.l[...].sum(axis=0, keepdims=True)
        return self.acc[...] / l, self.m[...] + jnp.log2(l)


class Values(NamedTuple):
    """The rows of V for some keys of a block."""

    ref: Any  # V of the whole key block, [keys, H], or transposed [H, keys]
    first: int  # the index, in the block, of the first of these keys
    is_turned: bool  # whether `ref` is transposed: matrix units of 128 x 128 transpose slowly

    def weighted(self, start: int, p: Float[Array, "C q"]) -> Float[Array, "H q"]:
        """Compute v^T p in float32 for the keys of `p`, which begin `start` keys after `first`."""
        keys = slice(self.first + start, self.first + start + p.shape[0])
        v = self.ref[:, keys] if self.is_turned else self.ref[keys, :]
        return product(v, p.astype(v.dtype), 1 if self.is_turned else 0, 0)


def scores(k: Float[Array, "C H"], q: Float[Array, "q H"]) -> Float[Array, "C q"]:
    return product(k, q, 1, 1)


def add_bounded(sums: Sums, s: Float[Array, "C q"], v: Values) -> None:
    """Add keys whose scores are small, without a running maximum."""
    acc, l = sums.acc[...], sums.l[...]
    for start in range(0, s.shape[0], INNER):
        p = jnp.exp2(s[start : start + INNER])
        l = l + by_sublane(p, jnp.sum)
        acc = acc + v.weighted(start, p)
    sums.acc[...], sums.l[...] = acc, l


def add_online(sums: Sums, s: Float[Array, "C q"], v: Values) -> None:
    """Add keys with any scores by the online softmax, `INNER` keys at a time."""
    acc, l, m = sums.acc[...], sums.l[...], sums.m[...]
    for start in range(0, s.shape[0], INNER):
        part = s[start : start + INNER]
        new = jnp.maximum(m, by_sublane(part, jnp.max).max(axis=0, keepdims=True))
        factor, p = jnp.exp2(m - new), jnp.exp2(part - new)
        l = l * factor + by_sublane(p, jnp.sum)
        acc, m = acc * factor + v.weighted(start, p), new
    sums.acc[...], sums.l[...], sums.m[...] = acc, l, m


def hide(s: Float[Array, "C q"], allowed: Bool[Array, "C q"]) -> Float[Array, "C q"]:
    return jnp.where(allowed, s, MASKED)


def product(a: Array, b: Array, over_a: int, over_b: int) -> Array:
    """Contract an axis of each operand in float32."""
    return lax.dot_general(
        a, b, (((over_a,), (over_b,)), ((), ())), preferred_element_type=jnp.float32
    )


def by_sublane(x: Float[Array, "C q"], reduce: Any) -> Float[Array, "8 q"]:
    return reduce(x.reshape(-1, SUBLANES, x.shape[1]), axis=0)


# ---- which blocks are bounded --------------------------------------------------------------------


def small_scores(
    q: Float[Array, "N T H"],
    k: Float[Array, "K S H"],
    v: Float[Array, "K S H"],
    block_q: int,
) -> Int[Array, "1 N*T//block_q"]:
    """Return 1 for each head and query block whose scores are small, else 0.

    Infinity and NaN are not small.

    Args:
        q: queries, multiplied by the scale and by log2(e).
        k, v: keys and values; N / K neighbouring query heads share a key head.
        block_q: number of queries in a block, a divisor of T.
    """
    heads = q.shape[0]
    queries = _norms(q).reshape(heads, -1, block_q).max(axis=2)
    keys, limit = (
        jnp.repeat(x, heads // k.shape[0]) for x in (_norms(k).max(axis=1), score_limit(v))
    )
    return (queries * keys[:, None] <= limit[:, None]).astype(jnp.int32).reshape(1, -1)


def score_limit(v: Float[Array, "K S H"]) -> Float[Array, " K"]:
    """Return the largest score, in base 2, that needs no running maximum beside these values."""
    largest = jnp.abs(v).astype(jnp.float32).max(axis=(1, 2))
    return LARGEST - jnp.abs(jnp.log2(jnp.where(largest == 0, 1.0, largest)))


def _norms(x: Float[Array, "N T H"]) -> Float[Array, "N T"]:
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axis=2))
