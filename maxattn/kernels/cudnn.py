"""cuDNN's fused attention through jax: O(T) memory both ways, and the LSE in float32.

Source: NVIDIA cuDNN, scaled dot product attention, through the primitives that jax keeps for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.cudnn import (
    CudnnBias,
    CudnnMask,
    CudnnRows,
    cudnn_backward,
    cudnn_forward,
)
from maxattn.kernels.base import USE_AUTO, Grads, Lines, Result, Rows, refuse_mask
from maxattn.kernels.fused import bias_limits, cudnn_limits
from maxattn.kernels.fused.kernel import Fused, mapped_call, refuse_shards
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.masks.band_pieces import pieces
from maxattn.masks.terms import Terms, sort_terms
from maxattn.target import Target


@dataclass(frozen=True)
class Cudnn(Fused):
    """Compute out = softmax(scale * q k^T + bias) v with cuDNN.

    Args:
        bias_gradient: whether a backward computes that of the bias, for which cuDNN needs memory.
    """

    name: ClassVar[str] = "cudnn"
    reaches: ClassVar[float] = 0.85  # H200, 32,760 tokens: 551 to 575 TFLOP/s
    bias_gradient: bool = True

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, long head dims, biases of another dtype, and masks of many kinds.

        Beside a bias it takes every mask: what is hidden is written into the bias.
        """
        refused = target.refuse_untested("cudnn", "jax") or cudnn_limits.refuse(
            "cudnn", call, target
        )
        if refused or call.bias is not None:
            return refused or bias_limits.refuse("cudnn", call, target)
        terms = sort_terms(call.mask)
        return (
            refuse_mask("cudnn", terms)
            or refuse_shards("cudnn", terms, call)
            or _refuse_window(terms, call)
        )

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("cudnn", "deterministic", rule, USE_AUTO)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Cudnn:
        """Take the scale, and whether the LSE is asked for."""
        return Cudnn(call.scale, call.return_lse)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines("cudnn (cuDNN through jax)", "the library's own")

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say what memory a bias takes."""
        return () if call.bias is None else (bias_limits.note(call),)

    def without_dbias(self) -> Cudnn:
        """Return the kernel whose backward leaves the bias's gradient out."""
        return replace(self, bias_gradient=False)

    def piece_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of one rectangle."""
        return mapped_call(self._one_forward, inputs)

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, dbias) of one rectangle."""
        return mapped_call(self._one_backward, inputs, rows)

    def _one_forward(self, inputs: PieceInputs) -> Result:
        qkv = inputs.q, inputs.k, inputs.v
        return Result(*cudnn_forward(qkv, _mask(inputs), self.scale, inputs.bias))

    def _one_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        qkv, given = (inputs.q, inputs.k, inputs.v), CudnnRows(rows.out, rows.lse, rows.dout)
        bias = CudnnBias(inputs.bias, self.bias_gradient)
        return Grads(*cudnn_backward(qkv, given, _mask(inputs), self.scale, bias))


def _refuse_window(terms: Terms, call: Call) -> Reason | None:
    """Refuse windows that are not `query - left <= key <= query` with query 0 at key 0, and those
    of more queries than keys.
    """
    band = terms.band
    assert band is not None
    if band.left is None:
        return None
    cut = pieces(band, band.offset, call.q_len, call.kv_len)
    fits = all(p.left is None or (p.right == 0 and p.q1 - p.q0 <= p.k1 - p.k0) for p in cut)
    if fits and not call.sharded:
        return None
    rule = (
        "it takes windows that end at the query, with query 0 at key 0, no more queries than keys"
        " and every token on one device"
    )
    return Reason("cudnn", f"mask {terms.positions[0]}", rule, USE_AUTO)


def _mask(inputs: PieceInputs) -> CudnnMask:
    """Write the band and the lengths of a rectangle as cuDNN takes them."""
    p, lengths = inputs.piece, inputs.lengths
    assert not isinstance(lengths, Pairs), lengths
    assert p.is_full or p.right == 0, p
    # A length of 0 is kept from the kernel; what that row then gives is replaced by 0 and -inf.
    some = None if lengths is None else jnp.maximum(lengths, 1)
    return CudnnMask(some, not p.is_full, None if p.left is None else p.left + 1)
