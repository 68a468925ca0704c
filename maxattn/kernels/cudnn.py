"""cuDNN's fused attention through jax: O(T) memory both ways, and the LSE in float32.

Source: NVIDIA cuDNN, scaled dot product attention, through the primitives that jax keeps for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.cudnn import CudnnMask, cudnn_backward, cudnn_forward
from maxattn.kernels.base import Grads, Lines, Result, Rows, refuse_repeats
from maxattn.kernels.fused import limits
from maxattn.kernels.fused.kernel import Fused, folded
from maxattn.kernels.fused.rectangles import Intervals, PieceInputs
from maxattn.target import Target


@dataclass(frozen=True)
class Cudnn(Fused):
    """Compute out = softmax(scale * q k^T + bias) v with cuDNN."""

    name: ClassVar[str] = "cudnn"
    reaches: ClassVar[float] = 0.85  # H200, 32,760 tokens: 551 to 575 TFLOP/s
    # whether a backward computes dbias, for which cuDNN needs extra memory
    bias_gradient: bool = True

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        reason = target.refuse_untested("cudnn", "jax")
        return reason or limits.refuse("cudnn", call, target, ends_at_query=True)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        return refuse_repeats("cudnn")

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Cudnn:
        return Cudnn(call.scale, call.return_lse)

    def lines(self, call: Call) -> Lines:
        return Lines("cudnn (cuDNN through jax)", "the library's own")

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return () if call.bias is None else (limits.note(call),)

    def without_dbias(self) -> Cudnn:
        return replace(self, bias_gradient=False)

    @folded
    def piece_forward(self, inputs: PieceInputs) -> Result:
        qkv = inputs.q, inputs.k, inputs.v
        return Result(*cudnn_forward(qkv, _mask(inputs), self.scale, inputs.bias))

    @folded
    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        qkv, given = (inputs.q, inputs.k, inputs.v), (rows.out, rows.lse, rows.dout)
        how = _mask(inputs), self.scale, inputs.bias, self.bias_gradient
        return Grads(*cudnn_backward(qkv, *given, *how))


def _mask(inputs: PieceInputs) -> CudnnMask:
    p, lengths = inputs.piece, inputs.lengths
    assert not isinstance(lengths, Intervals), lengths
    assert p.is_full or p.right == 0, p
    # cuDNN gets length 1 for a length of 0; that batch row's result is then set to 0 and -inf.
    some = None if lengths is None else jnp.maximum(lengths, 1)
    return CudnnMask(some, not p.is_full, None if p.left is None else p.left + 1)
