"""The adaptive norm step by step, as XLA computes it everywhere and takes its gradient."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.modules.adaptive_layer_norm.vectors import VectorParts, sum_of_rows

Tokens = Float[Array, "B T D"]
Parts = tuple[Float[Array, "#B #F R D"], ...]


class NormWork(NamedTuple):
    """Say what is done to each token.

    Args:
        eps: added to the variance.
        vectors: by name, those that there are: "scale" and "shift" of the norm, "gate" and "bias"
            of the branch.
    """

    eps: float
    vectors: tuple[tuple[str, VectorParts], ...]


def in_steps(work: NormWork, rows: tuple[Tokens, ...], parts: Parts) -> tuple[Tokens, ...]:
    """Compute what the kernel computes: the normed tokens and, after a branch, the sum.

    Args:
        work: what is done.
        rows: x, and the branch where there is one.
        parts: of the vectors, in the order of `work.vectors`.
    """
    x, *branch = rows
    vectors = _vectors(work, parts, x.shape[1])
    for y in branch:
        x = gated(x, y, vectors.get("gate"), vectors.get("bias"))
    z = x.astype(jnp.float32)
    z = z - jnp.mean(z, axis=-1, keepdims=True)
    n = z * jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + work.eps)
    n = n * vectors["scale"] if "scale" in vectors else n
    n = n + vectors["shift"] if "shift" in vectors else n
    return (n.astype(x.dtype), x) if branch else (n.astype(x.dtype),)


def gated(x: Tokens, y: Tokens, gate: Array | None, bias: Array | None) -> Tokens:
    """Compute x + gate * (y + bias) in float32; keep the dtype of x."""
    branch = y.astype(jnp.float32)
    branch = branch if bias is None else branch + bias
    branch = branch if gate is None else branch * gate
    return (x.astype(jnp.float32) + branch).astype(x.dtype)


def of_tokens(vector: Float[Array, "#B #F D"], tokens: int) -> Float[Array, "#B #T D"]:
    """Return a vector for every token, or for all where F is 1."""
    b, frames, d = vector.shape
    if frames == 1:
        return vector
    spread = (b, frames, tokens // frames, d)
    # [B, F, D] -> [B, F, T / F, D] -> [B, T, D]
    return jnp.broadcast_to(vector[:, :, None], spread).reshape(b, tokens, d)


def _vectors(work: NormWork, parts: Parts, tokens: int) -> dict[str, Float[Array, "#B #T D"]]:
    # Vector by vector: XLA would write all rows of all tokens, and read them again in each layer.
    found, first = {}, 0
    for name, vector in work.vectors:
        last = first + len(vector.rows)
        value = sum_of_rows(parts[first:last], vector.rows)
        value = value + vector.constant if vector.constant else value
        found[name], first = of_tokens(value, tokens), last
    return found
