"""cuDNN's fused attention through jax: O(T) memory both ways, float32 LSE, a backward from a given
LSE.

Source: NVIDIA cuDNN, scaled dot product attention; jax._src.cudnn.fused_attention_stablehlo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.cudnn import cudnn_backward, cudnn_forward
from maxattn.kernels.base import Lines
from maxattn.kernels.fused import masks as fused_masks
from maxattn.kernels.fused.kernel import Fused, Lengths, Pairs, refuse_shards
from maxattn.kernels.fused.pieces import Piece, pieces
from maxattn.kernels.requirements import untested
from maxattn.target import Target


@dataclass(frozen=True)
class Cudnn(Fused):
    """Compute out = softmax(scale * q k^T) v with cuDNN."""

    name: ClassVar[str] = "cudnn"

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, head dims over 256 (128 before Hopper), a bias, and masks other than
        bands and lengths.
        """
        most = target.device.family.cudnn_head_dim
        reason = untested("cudnn", "jax", target) or fused_masks.refuse_call("cudnn", call, most)
        parts = fused_masks.split(call.mask)
        reason = (
            reason or fused_masks.refuse_mask("cudnn", parts) or refuse_shards("cudnn", parts, call)
        )
        return reason or _refuse_window(parts, call)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("cudnn", "deterministic", rule, fused_masks.REMEDY)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Cudnn:
        """Take the scale, and whether the LSE is asked for."""
        return Cudnn(call.scale, call.return_lse)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines("cudnn (cuDNN through jax)", "the library's own")

    def piece_forward(
        self, q: Array, k: Array, v: Array, piece: Piece, lengths: Lengths
    ) -> tuple[Array, Array]:
        """Return (out, lse) of one rectangle."""
        return cudnn_forward(q, k, v, _some(lengths), *_band(piece), self.scale)

    def piece_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        piece: Piece,
        lengths: Lengths,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv) of one rectangle."""
        return cudnn_backward(q, k, v, out, lse, dout, _some(lengths), *_band(piece), self.scale)


def _refuse_window(parts: fused_masks.Parts, call: Call) -> Reason | None:
    """Refuse windows that are not `query - left <= key <= query` with query 0 at key 0."""
    band = parts.band
    assert band is not None
    if band.left is None:
        return None
    cut = pieces(band, band.offset, call.q_len, call.kv_len)
    ends_at_query = all(p.left is None or p.right == 0 for p in cut)
    if ends_at_query and not call.sharded:
        return None
    rule = (
        "it takes windows that end at the query, with query 0 at key 0 and every token on one"
        " device"
    )
    return Reason("cudnn", f"mask {parts.positions[0]}", rule, fused_masks.REMEDY)


def _band(p: Piece) -> tuple[bool, int | None]:
    """Write a band as (causal, window)."""
    assert p.is_full or p.right == 0, p
    return not p.is_full, None if p.left is None else p.left + 1


def _some(lengths: Lengths) -> Array | None:
    """Keep a length of 0 from the kernel; what that row then gives is replaced by 0 and -inf."""
    assert not isinstance(lengths, Pairs), lengths
    return None if lengths is None else jnp.maximum(lengths, 1)
