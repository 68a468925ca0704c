"""One rectangle of pairs for a library, and the merge of several rectangles' results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxattn.kernels.base import Grads, Result, Rows
from maxattn.kernels.softmax import NEG_INF, gradient_dtype, merge_by_lse
from maxattn.masks.band_pieces import Piece


class Intervals(NamedTuple):
    """Query i of batch row b sees keys `lo[b, i] <= j < hi[b, i]`."""

    lo: Int[Array, "#B T"]
    hi: Int[Array, "#B T"]


Lengths = Int[Array, " B"] | Intervals | None
"""The number of real keys per batch row, or a key interval per query; None: all are real."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k", "v", "lengths", "bias"],
    meta_fields=["piece"],
)
@dataclass(frozen=True)
class PieceInputs:
    """The arrays of one rectangle of pairs, and which pairs are allowed.

    Args:
        q, k, v: the rectangle's queries, keys and values.
        lengths: the real keys, which restrict the band of `piece` further; None: all are real.
        piece: the rectangle's ranges of queries and of keys, and its band.
        bias: the bias of every pair, as a library takes it (biased.py); default None.
    """

    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    lengths: Lengths
    piece: Piece
    bias: Float[Array, "#B #N T S"] | None = None

    @classmethod
    def whole(cls, q: Array, k: Array, v: Array, lengths: Lengths) -> PieceInputs:
        return cls(q, k, v, lengths, Piece(0, q.shape[1], 0, k.shape[1]))

    def cut(self, p: Piece) -> PieceInputs:
        k, v = self.k[:, p.k0 : p.k1], self.v[:, p.k0 : p.k1]
        lengths = self.lengths
        if lengths is not None and not isinstance(lengths, Intervals):
            lengths = jnp.clip(lengths - p.k0, 0, p.k1 - p.k0)
        return PieceInputs(self.q[:, p.q0 : p.q1], k, v, lengths, p)

    def seen(self) -> Bool[Array, "#B T"] | None:
        """Return which queries see a real key; None if all do, or if `lengths` are intervals."""
        p, lengths = self.piece, self.lengths
        if isinstance(lengths, Intervals) or (lengths is None and p.sees_all()):
            return None
        row = jnp.arange(p.q1 - p.q0)[None]
        first = 0 if p.left is None else jnp.maximum(0, row - p.left)
        end: Any = p.k1 - p.k0 if lengths is None else lengths[:, None]
        end = end if p.right is None else jnp.minimum(end, row + p.right + 1)
        batch = 1 if lengths is None else lengths.shape[0]
        return jnp.broadcast_to(first < end, (batch, row.shape[1]))


def cut_rows(rows: Rows, p: Piece) -> Rows:
    out, dout = (x[:, p.q0 : p.q1] for x in (rows.out, rows.dout))
    lse, dlse = (x[:, :, p.q0 : p.q1] for x in (rows.lse, rows.dlse))
    return Rows(out, lse, dout, dlse)


def without_unseen(inputs: PieceInputs, rows: Rows) -> Rows:
    """Let queries that see no key of this rectangle, or of the call, add nothing to a gradient."""
    seen = inputs.seen()
    if seen is not None:
        return rows.without_unseen(seen[:, None])
    # Only padded queries see no key, and padded queries have dout 0 already.
    return replace(rows.without_unseen(), dout=rows.dout)


def merged(found: list[tuple[Piece, Result]], q: Array) -> Result:
    """Merge the results by LSE in float32; if `found` is empty, no query sees a key."""
    if len(found) == 1 and found[0][0].q0 == 0:
        return found[0][1]

    def among_all(p: Piece, part: Result) -> tuple[Array, Array]:
        around = ((0, 0), (p.q0, q.shape[1] - p.q1))
        out = jnp.pad(part.out.astype(jnp.float32), (*around, (0, 0), (0, 0)))
        return out, jnp.pad(part.lse, ((0, 0), *around), constant_values=NEG_INF)

    stats = q.shape[0], q.shape[2], q.shape[1]
    nothing = jnp.zeros(q.shape, jnp.float32), jnp.full(stats, NEG_INF, jnp.float32)
    out, lse = merge_by_lse([among_all(p, part) for p, part in found] or [nothing])
    return Result(out.astype(q.dtype), lse)


def summed(found: list[tuple[Piece, Grads]], q: Array, k: Array) -> Grads:
    """Add up the rectangles' gradients at their tokens: dk and dv in float32."""
    if len(found) == 1 and found[0][0][:4] == (0, q.shape[1], 0, k.shape[1]):
        dq, dk, dv, _ = found[0][1]
        return Grads(dq.astype(gradient_dtype(q)), dk, dv)
    dq = jnp.zeros(q.shape, jnp.float32)
    dk = dv = jnp.zeros(k.shape, jnp.float32)
    for p, part in found:
        dq = dq.at[:, p.q0 : p.q1].add(part.dq)
        dk, dv = dk.at[:, p.k0 : p.k1].add(part.dk), dv.at[:, p.k0 : p.k1].add(part.dv)
    return Grads(dq.astype(gradient_dtype(q)), dk, dv)
