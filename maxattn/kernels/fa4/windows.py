"""A band as FlashAttention-4 takes it: a window in which the last query stands at the last key."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import Grads, Result, Rows
from maxattn.kernels.fa4.primitives import Window
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks.band_pieces import Piece


def fitted(p: Piece, t: int, s: int) -> tuple[int, int, Window]:
    """Return (queries, keys, window) as the library counts it: query 0 stands at key S - T.

    Keys that no query sees, and queries that see none, are left out, so that neither side of the
    window is negative.
    """
    if p.is_full:
        return t, s, (None, None)
    if p.right is not None:
        s = min(s, t + p.right)
    if p.left is not None:
        t = min(t, s + p.left)
    move = s - t
    right = None if p.right is None else p.right - move
    return t, s, (None if p.left is None else p.left + move, right)


def shortened(inputs: PieceInputs) -> tuple[PieceInputs, Window]:
    """Leave out what no pair of the window has, and write lengths as ids, which go beside it."""
    q, k, v = inputs.q, inputs.k, inputs.v
    t, s, window = fitted(inputs.piece, q.shape[1], k.shape[1])
    cut = replace(inputs, q=q[:, :t], k=k[:, :s], v=v[:, :s], lengths=_as_pairs(inputs))
    return cut, window


def shortened_rows(rows: Rows, queries: int) -> Rows:
    """Keep so many queries."""
    out, dout = rows.out[:, :queries], rows.dout[:, :queries]
    return Rows(out, rows.lse[:, :, :queries], dout, rows.dlse[:, :, :queries])


def lengthened(result: Result, queries: int) -> Result:
    """Put back the queries that were left out: they saw nothing."""
    extra = queries - result.out.shape[1]
    if not extra:
        return result
    lse = jnp.pad(result.lse, ((0, 0), (0, 0), (0, extra)), constant_values=NEG_INF)
    return Result(_longer(result.out, queries), lse)


def lengthened_grads(grads: Grads, inputs: PieceInputs) -> Grads:
    """Put back the queries and keys that were left out: their gradients are 0."""
    t, s = inputs.q.shape[1], inputs.k.shape[1]
    return Grads(_longer(grads.dq, t), _longer(grads.dk, s), _longer(grads.dv, s))


def _longer(x: Array, length: int) -> Array:
    extra = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else x


def _as_pairs(inputs: PieceInputs) -> Pairs | None:
    """Write lengths beside a window as ids: 0 for real keys, and for all queries."""
    lengths, (batch, t), s = inputs.lengths, inputs.q.shape[:2], inputs.k.shape[1]
    if lengths is None or isinstance(lengths, Pairs):
        return lengths
    past = (jnp.arange(s, dtype=jnp.int32)[None] >= lengths[:, None]).astype(jnp.int32)
    return Pairs(None, None, jnp.zeros((batch, t), jnp.int32), past)
