"""`Fused`: the adapter from the `Kernel` interface to the attention kernel of any GPU library.

A library computes a rectangle of query-key pairs: all pairs, or a band that starts at the
rectangle's corner, with a number of real keys per batch row. `Fused` cuts a mask into such
rectangles and merges their results. Queries that see no key get output 0 and LSE -inf. `Fused` also
adds the gradient of the LSE, which libraries drop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from maxattn.kernels.base import (
    Grads,
    Inputs,
    Kernel,
    Result,
    Rows,
    padded_heads,
    padded_rows,
    real_keys_first,
    with_batch_folded,
    with_lse_gradient,
)
from maxattn.kernels.fused import biased, rectangles
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks.band_pieces import Piece, run_pieces
from maxattn.masks.terms import sort_terms

Pieces = tuple[Piece, ...]
Out = TypeVar("Out", Result, Grads)


@dataclass(frozen=True)
class Fused(Kernel):
    """Run a library's kernel on the rectangles of a mask."""

    name: ClassVar[str]
    needs_an_example: ClassVar[bool] = True
    hides_beside_bias: ClassVar[bool] = True
    """Whether the library hides causal pairs and padded keys by itself if there is a bias."""
    takes_any_bias: ClassVar[bool] = False
    """Whether the library adds a bias of any dtype; else the bias must have the dtype of q."""
    scale: float  # factor of the scores, applied in float32 inside the kernel
    lse_gradient: bool = False  # whether the caller gets the LSE, which can then have a gradient

    def piece_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of one rectangle."""
        raise NotImplementedError

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return a rectangle's gradients from its output and LSE, with dbias if it has a bias."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> Result:
        if inputs.bias is not None:
            return biased.forward(self, inputs)
        width, (inputs, _) = inputs.q.shape[3], real_keys_first(padded_heads(inputs))

        def compute(pieces: Pieces, given: PieceInputs) -> Result:
            found = [(p, self.rectangle_forward(given.cut(p))) for p in pieces]
            return rectangles.merged(found, given.q)

        out, lse = _over_pieces(inputs, compute)
        return Result(out[..., :width], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return the gradients; dk and dv are float32, but a library rounded them to k's dtype."""
        if inputs.bias is not None:
            return biased.backward(self, inputs, rows)
        width, (inputs, order) = inputs.q.shape[3], real_keys_first(padded_heads(inputs))

        def compute(pieces: Pieces, given: PieceInputs, rows: Rows) -> Grads:
            found = [
                (p, self._backward(given.cut(p), rectangles.cut_rows(rows, p))) for p in pieces
            ]
            return rectangles.summed(found, given.q, given.k)

        found = _over_pieces(inputs, compute, padded_rows(rows, inputs.q))
        dq, dk, dv, _ = found.in_order(order)
        return Grads(dq[..., :width], dk[..., :width], dv[..., :width])

    # ---- one rectangle ---------------------------------------------------------------------------

    def rectangle_forward(self, inputs: PieceInputs) -> Result:
        """Return one rectangle's result: output 0 and LSE -inf for queries without keys in it."""
        found, seen = self.piece_forward(inputs), inputs.seen()
        return found if seen is None else found.where(seen[:, None])

    def _backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return the float32 gradients of one rectangle, including those from dlse."""
        rows = rectangles.without_unseen(inputs, rows)
        dq, dk, dv, _ = self.piece_backward(inputs, rows)
        found = Grads(*(x.astype(jnp.float32) for x in (dq, dk, dv)))
        if not self.lse_gradient:
            return found
        both = self.piece_forward, self.piece_backward
        return with_lse_gradient(found, inputs, rows, self.scale, *both)


def _over_pieces(inputs: Inputs, compute: Callable[..., Any], *rows: Rows) -> Any:
    terms, (q, k) = sort_terms(inputs.mask), (inputs.q, inputs.k)
    real = terms.lengths(q.shape[0], k.shape[1], inputs.kv_offset)
    operands = PieceInputs.whole(q, k, inputs.v, real), *rows
    shift, lengths = inputs.q_offset - inputs.kv_offset, (q.shape[1], k.shape[1])
    return run_pieces(terms, shift, lengths, compute, *operands)


def folded(method: Callable[..., Out]) -> Callable[..., Out]:
    """Decorate a method of one rectangle: under `vmap`, fold the mapped axis into the batch.

    With a bias, `vmap` runs the method in a loop, since a shared bias's gradient is summed over the
    whole batch.
    """

    def call(kernel: Fused, inputs: PieceInputs, *rows: Rows) -> Out:
        def run(inputs: PieceInputs, *rows: Rows) -> Out:
            return method(kernel, inputs, *rows)

        if inputs.bias is None:
            return with_batch_folded(run, inputs, *rows)
        return jax.custom_batching.sequential_vmap(run)(inputs, *rows)

    return call
