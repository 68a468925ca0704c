"""`Fused`: the adapter from the `Kernel` interface to the attention kernel of any GPU library.

A library computes a rectangle of query-key pairs: all pairs, or a band that starts at the
rectangle's corner, with a number of real keys per batch row. `Fused` cuts a mask into such
rectangles and merges their results. Queries that see no key get output 0 and LSE -inf. `Fused` also
adds the gradient of the LSE (dlse), which libraries drop:

    dS = P * (dP - delta) + P * dlse
    dq += scale * dlse * (P k)        dk += P^T (scale * dlse * q)

The library computes P k in a forward, and P^T (..) in a backward, with k passed as v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import (
    Grads,
    Inputs,
    Kernel,
    Result,
    Rows,
    gathered,
    padded_heads,
    padded_rows,
    with_batch_folded,
)
from maxattn.kernels.fused import biased, rectangles
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.kernels.softmax import NEG_INF, column
from maxattn.masks.band_pieces import Piece, run_pieces
from maxattn.masks.terms import Terms, sort_terms

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Fused(Kernel):
    """Run a library's kernel on the rectangles of a mask.

    Args:
        scale: factor of the scores, applied in float32 inside the kernel.
        lse_gradient: whether the caller gets the LSE, which can then have a gradient.
    """

    name: ClassVar[str]
    needs_an_example: ClassVar[bool] = True
    hides_beside_bias: ClassVar[bool] = True
    """Whether the library hides causal pairs and padded keys by itself if there is a bias."""
    takes_any_bias: ClassVar[bool] = False
    """Whether the library adds a bias of any dtype; else the bias must have the dtype of q."""
    scale: float
    lse_gradient: bool = False

    def piece_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of one rectangle."""
        raise NotImplementedError

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return a rectangle's gradients from its output and LSE, with dbias if it has a bias."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> Result:
        if inputs.bias is not None:
            return biased.forward(self, inputs)
        width, terms = inputs.q.shape[3], sort_terms(inputs.mask)
        inputs = padded_heads(inputs)

        def compute(pieces: Pieces, given: PieceInputs) -> Result:
            found = [(p, self.rectangle_forward(given.cut(p))) for p in pieces]
            return rectangles.merged(found, given.q)

        given = _real_keys_first(terms, inputs, _order(terms, inputs))
        out, lse = _over_pieces(terms, inputs, compute, given)
        return Result(out[..., :width], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return the gradients; dk and dv are float32, but a library rounded them to k's dtype."""
        if inputs.bias is not None:
            return biased.backward(self, inputs, rows)
        width, terms = inputs.q.shape[3], sort_terms(inputs.mask)
        inputs = padded_heads(inputs)

        def compute(pieces: Pieces, given: PieceInputs, rows: Rows) -> Grads:
            found = [
                (p, self._backward(given.cut(p), rectangles.cut_rows(rows, p))) for p in pieces
            ]
            return rectangles.summed(found, given.q, given.k)

        order = _order(terms, inputs)
        operands = _real_keys_first(terms, inputs, order), padded_rows(rows, inputs.q)
        dq, dk, dv, _ = _over_pieces(terms, inputs, compute, *operands)
        if order is not None:
            dk, dv = (gathered(x, jnp.argsort(order, axis=1)) for x in (dk, dv))
        return Grads(dq[..., :width], dk[..., :width], dv[..., :width])

    # ---- one rectangle ---------------------------------------------------------------------------

    def rectangle_forward(self, inputs: PieceInputs) -> Result:
        """Return one rectangle's result: output 0 and LSE -inf for queries without keys in it."""
        out, lse = self.piece_forward(inputs)
        seen = inputs.seen()
        if seen is None:
            return Result(out, lse)
        out = jnp.where(seen[:, :, None, None], out, 0).astype(inputs.q.dtype)
        return Result(out, jnp.where(seen[:, None], lse, NEG_INF))

    def _backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return the float32 gradients of one rectangle, including those from dlse."""
        rows = rectangles.without_unseen(inputs, rows)
        dq, dk, dv, _ = self.piece_backward(inputs, rows)
        dq, dk, dv = (x.astype(jnp.float32) for x in (dq, dk, dv))
        if self.lse_gradient:
            of_lse = self._of_lse(inputs, rows)
            dq, dk = dq + of_lse[0], dk + of_lse[1]
        return Grads(dq, dk, dv)

    def _of_lse(self, inputs: PieceInputs, rows: Rows) -> tuple[Array, Array]:
        """Return the parts of (dq, dk) that come from dlse, the gradient of the LSE."""
        dlse, q = rows.dlse, inputs.q.astype(jnp.float32)
        with_k = replace(inputs, v=inputs.k)
        pk, here = self.piece_forward(with_k)
        weight = jnp.where(dlse == 0.0, 0.0, self.scale * dlse * jnp.exp(here - rows.lse))
        dq = column(weight) * pk.astype(jnp.float32)
        dout = (column(self.scale * dlse) * q).astype(inputs.q.dtype)
        dk = self.piece_backward(with_k, Rows(pk, rows.lse, dout, dlse)).dv  # k is passed as v
        return jnp.where(column(dlse) == 0.0, 0.0, dq), dk.astype(jnp.float32)


def _order(terms: Terms, inputs: Inputs) -> Array | None:
    """Return an order of keys that puts real keys first; None if no flags mark real keys."""
    if not terms.has_flags:
        return None
    return terms.real_keys_first(inputs.q.shape[0], inputs.k.shape[1], inputs.kv_offset)


def _real_keys_first(terms: Terms, inputs: Inputs, order: Array | None) -> PieceInputs:
    k, v = (x if order is None else gathered(x, order) for x in (inputs.k, inputs.v))
    lengths = terms.lengths(inputs.q.shape[0], inputs.k.shape[1], inputs.kv_offset)
    return PieceInputs.whole(inputs.q, k, v, lengths)


def _over_pieces(terms: Terms, inputs: Inputs, compute: Callable[..., Any], *operands: Any) -> Any:
    lengths = inputs.q.shape[1], inputs.k.shape[1]
    return run_pieces(terms, inputs.q_offset - inputs.kv_offset, lengths, compute, *operands)


def mapped_call(run: Callable[..., Any], inputs: PieceInputs, *rows: Any) -> Any:
    """Return `run(inputs, *rows)`; under `vmap`, fold the mapped axis into the batch. With a bias,
    `vmap` calls `run` in a loop, since a shared bias's gradient is summed over the whole batch.
    """
    if inputs.bias is None:
        return with_batch_folded(run, inputs, *rows)
    return jax.custom_batching.sequential_vmap(run)(inputs, *rows)
