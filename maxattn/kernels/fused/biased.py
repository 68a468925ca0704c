"""Prepare a bias for GPU libraries: one value per pair in q's dtype, with the mask written into it.

    allowed pairs: given = clip(bias - far level, lowest, -lowest)        hidden pairs: lowest

A library adds `given` to the scores in float32. `lowest` is finite: if a tile had only -inf, a
query's maximum would be -inf, and exp(-inf - -inf) is NaN. The far level is a query's level
(bias_level.py) if its size is above `FAR`, else 0. Subtracting the level is exact for biases within
a factor of 2 of it, and other biases are hundreds below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.kernels.base import Grads, Inputs, Result, Rows, padded_heads, padded_rows
from maxattn.kernels.fused import rectangles
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.kernels.softmax import NEG_INF, cleared, fold_like, gradient_dtype
from maxattn.masks.band_pieces import Piece, pieces
from maxattn.masks.terms import sort_terms
from maxattn.sharding import pad_axis

if TYPE_CHECKING:
    from maxattn.kernels.fused.kernel import Fused

# The bias of hidden pairs; if it is a query's maximum, exponents still fit float32.
LOWEST = {"bfloat16": -(2.0**30), "float16": -65504.0, "float32": -(2.0**30)}
FAR = 2.0**10  # float32 rounds a score plus a level of this size to 2**-14
QUERIES, KEYS = 2, 8  # T and S are padded to these multiples, for cuDNN and 16-byte loads


@dataclass(frozen=True)
class Biased:
    """A call with a bias, padded and masked for a library.

    Args:
        given: padded q, k, v and bias, and the pairs that the library hides by itself.
        kept: the level that each query's bias still contains; 0 if the level was subtracted.
        queries, keys, head_dim: T, S and H before padding.
    """

    given: PieceInputs
    kept: Float[Array, "#B #N #T"]
    queries: int
    keys: int
    head_dim: int

    @staticmethod
    def of(inputs: Inputs, library: type[Fused]) -> Biased:
        """Pad a call, and write `lowest` into the bias of pairs that the library does not hide."""
        head_dim, inputs = inputs.q.shape[3], padded_heads(inputs)
        (t, s), piece = (inputs.q.shape[1], inputs.k.shape[1]), _own_piece(inputs)
        piece = piece if library.hides_beside_bias or inputs.mask.is_full else None
        terms = sort_terms(inputs.mask)
        hides = piece is None or bool(terms.limits or terms.keys or terms.rest)
        level = 0.0 if inputs.bias_level is None else inputs.bias_level
        far = jnp.where(jnp.abs(jnp.asarray(level)) > FAR, level, 0.0)
        bias = _written(inputs, far, hides, library)
        q = pad_axis(inputs.q, 1, t + -t % QUERIES)
        k, v = (pad_axis(x, 1, s + -s % KEYS) for x in (inputs.k, inputs.v))
        whole = Piece(0, q.shape[1], 0, k.shape[1], None, None if piece is None else piece.right)
        kept = jnp.broadcast_to(level - far, (1,) * 4) if jnp.ndim(far) == 0 else level - far
        return Biased(PieceInputs(q, k, v, None, whole, bias), kept[..., 0], t, s, head_dim)

    def result(self, found: Result) -> Result:
        """Return (out, lse) without padding; (0, -inf) for a query whose keys are all hidden."""
        out, lse = found.out[:, : self.queries, :, : self.head_dim], found.lse[..., : self.queries]
        assert self.given.bias is not None
        is_hidden = lse < LOWEST[str(self.given.bias.dtype)] / 2
        return Result(out, lse - self.kept).where(~is_hidden)

    def rows(self, rows: Rows) -> Rows:
        """Pad `rows` for the library's backward, and add the kept levels to the LSE."""
        rows, length = padded_rows(rows, self.given.q), self.given.q.shape[1]
        dout = cleared(rows.dout, rows.lse)
        out, dout = (pad_axis(x, 1, length) for x in (rows.out, dout))
        lse = pad_axis(rows.lse + self.kept, 2, length, NEG_INF)
        dlse = pad_axis(rows.dlse, 2, length)
        return rectangles.without_unseen(self.given, Rows(out, lse, dout, dlse))

    def grads(self, found: Grads, inputs: Inputs) -> Grads:
        """Return the gradients without padding, and dbias in the shape of the caller's bias."""
        width, bias = self.head_dim, inputs.bias
        assert bias is not None
        dq = found.dq[:, : self.queries, :, :width].astype(gradient_dtype(inputs.q))
        dk, dv = (x[:, : self.keys, :, :width] for x in (found.dk, found.dv))
        if found.dbias is None:
            return Grads(dq, dk, dv, jnp.zeros(bias.shape, jnp.float32))
        dbias = found.dbias[:, :, : self.queries, : self.keys]
        if self.given.piece.right is not None:
            # A library may skip tiles that a causal mask hides, and leave garbage in their dbias.
            row, key = (jax.lax.broadcasted_iota(jnp.int32, dbias.shape, axis) for axis in (2, 3))
            dbias = jnp.where(key <= row, dbias, 0.0)
        return Grads(dq, dk, dv, fold_like(dbias, bias.shape))


def forward(kernel: Fused, inputs: Inputs) -> Result:
    """Return (out, lse) of a call with a bias."""
    made = Biased.of(inputs, type(kernel))
    return made.result(kernel.rectangle_forward(made.given))


def backward(kernel: Fused, inputs: Inputs, rows: Rows) -> Grads:
    """Return (dq, dk, dv, dbias); the last three are float32.

    The LSE's gradient takes a second backward, with v = (1, 0, ..), dout = (dlse, 0, ..), out = 0:

        dP = dlse        dS = P * dlse
    """
    made = Biased.of(inputs, type(kernel))
    given = made.rows(rows)
    found = _in_float32(kernel.piece_backward(made.given, given))
    if kernel.lse_gradient:
        first = jnp.zeros_like(made.given.v).at[..., 0].set(1)
        dlse = given.dlse.swapaxes(1, 2).astype(made.given.q.dtype)
        dout = jnp.zeros_like(given.dout).at[..., 0].set(dlse)
        rows = Rows(jnp.zeros_like(given.out), given.lse, dout, given.dlse)
        of_lse = _in_float32(kernel.piece_backward(replace(made.given, v=first), rows))
        found = jax.tree.map(jnp.add, found, of_lse._replace(dv=jnp.zeros_like(found.dv)))
    return made.grads(found, inputs)


def _in_float32(grads: Grads) -> Grads:
    return jax.tree.map(lambda x: x.astype(jnp.float32), grads)


# ---- the mask ------------------------------------------------------------------------------------


def _own_piece(inputs: Inputs) -> Piece | None:
    """Return one rectangle of all pairs if the mask's positions are causal or full, else None."""
    band, (t, s) = sort_terms(inputs.mask).band, (inputs.q.shape[1], inputs.k.shape[1])
    whole = Piece(0, t, 0, s)
    if band is None or band.is_full:
        return None if band is None else whole
    shift = inputs.q_offset - inputs.kv_offset + band.offset
    cut = () if isinstance(shift, jax.Array) else pieces(band, int(shift), t, s)
    return next((piece for piece in (whole, whole._replace(right=0)) if cut == (piece,)), None)


def _written(
    inputs: Inputs, far: Any, hides: bool, library: type[Fused]
) -> Float[Array, "#B #N T S"]:
    bias, (q, k) = inputs.bias, (inputs.q, inputs.k)
    assert bias is not None
    dtype = bias.dtype if library.takes_any_bias else q.dtype
    lowest, (t, s) = LOWEST[str(dtype)], (q.shape[1], k.shape[1])
    x = bias.astype(jnp.float32) - far
    if hides:
        at = inputs.q_offset, inputs.kv_offset
        x = jnp.where(inputs.mask.allowed(jnp.arange(t), jnp.arange(s), *at), x, lowest)
    x = jnp.broadcast_to(jnp.clip(x, lowest, -lowest).astype(dtype), (*x.shape[:2], t, s))
    return jnp.pad(x, ((0, 0), (0, 0), (0, -t % QUERIES), (0, -s % KEYS)), constant_values=lowest)
