"""tokamax's Pallas Mosaic kernels on NVIDIA GPUs: what `tokamax_flash` is there.

Its masks are one interval of keys for each query: bands, block windows and lengths, at any offset.
The forward skips tiles outside the intervals; the backward computes and masks them, but for a
causal mask.

Source: openxla/tokamax, PallasMosaicGpuFlashAttention and its VJP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Inputs, Lines, Offset, Result, Rows
from maxattn.kernels.fused import masks as fused_masks
from maxattn.kernels.fused.kernel import Fused, Lengths, Pairs
from maxattn.kernels.fused.pieces import Piece
from maxattn.kernels.fused.tokamax_fence import backward_module
from maxattn.kernels.requirements import untested
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Full, Mask
from maxattn.target import Target

NEEDS = (0, 0, 17)
HEAD_LIMIT = 256
# One tile of keys: tiles of 128 queries took 0.094 ms instead of 0.106 at SDXL's text (H200;
# 16,4096,77,10,64).
SHORT_HEAD, SHORT_KEYS = 64, 128


@dataclass(frozen=True)
class TokamaxMosaic(Fused):
    """Compute out = softmax(scale * q k^T) v with tokamax's Mosaic GPU kernels.

    Args:
        version: of tokamax.
    """

    name: ClassVar[str] = "tokamax_flash"
    version: str = ""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse tokamax before 0.0.17, other GPUs than Hopper, float32, a bias, masks with several
        intervals.
        """
        version = target.version("tokamax") or ""
        if _numbers(version) < NEEDS:
            rule = (
                "it needs tokamax 0.0.17 or newer on a GPU, and this is"
                f" {version or 'not installed'}"
            )
            return Reason("tokamax_flash", "package", rule, 'pip install "tokamax>=0.0.17"')
        if not target.device.is_a("hopper"):
            rule = f"its backward here is for Hopper GPUs, and this is {target.device_kind}"
            return Reason("tokamax_flash", "device", rule, "set attention: auto")
        reason = untested("tokamax_flash", "tokamax", target)
        reason = reason or fused_masks.refuse_call("tokamax_flash", call, HEAD_LIMIT)
        parts = fused_masks.split(call.mask)
        return (
            reason
            or fused_masks.refuse_mask("tokamax_flash", parts, rows=True)
            or _refuse_rows(parts)
        )

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Accept: dQ and dK, dV are each written once, by two kernels (and by the fence of
        fused/tokamax_fence.py).
        """
        return None

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> TokamaxMosaic:
        """Take the scale, and whether the LSE is asked for."""
        return TokamaxMosaic(call.scale, call.return_lse, target.version("tokamax") or "")

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        runs = f"tokamax_flash (tokamax {self.version}, Mosaic GPU)"
        own = "the library's own"
        return Lines(runs, own, f"{own}, and a fence that it lacks")

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        if not _takes_intervals(fused_masks.split(mask), q_offset, kv_offset):
            return super().forward(inputs)
        piece, pairs = _intervals(mask, q, k, q_offset, kv_offset)
        out, lse = self.piece_forward(q, k, v, piece, pairs)
        seen = _seen(pairs)
        out = jnp.where(seen[..., None, None], out, 0).astype(q.dtype)
        return Result(out, jnp.where(seen[:, None], lse, NEG_INF))

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, None) from a given LSE and output."""
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        out, lse, dout, dlse = rows.operands
        if not _takes_intervals(fused_masks.split(mask), q_offset, kv_offset):
            return super().backward(inputs, rows)
        piece, pairs = _intervals(mask, q, k, q_offset, kv_offset)
        seen = _seen(pairs)
        dout = jnp.where(seen[..., None, None], dout, 0).astype(q.dtype)
        lse = jnp.where(seen[:, None], lse, NEG_INF)
        dq, dk, dv = self._backward(q, k, v, piece, pairs, out.astype(q.dtype), lse, dout, dlse)
        return Grads(dq.astype(q.dtype), dk, dv)

    def piece_forward(
        self, q: Array, k: Array, v: Array, piece: Piece, lengths: Lengths
    ) -> tuple[Array, Array]:
        """Return (out, lse) of one rectangle."""
        op = _configured(q, k, v, self.scale, _mask(piece, lengths))
        out, (top, total) = op.op(*op.args, **op.kwargs | {"return_residuals": True})
        return out, top + jnp.log(total)

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
        bound = _configured(q, k, v, self.scale, _mask(piece, lengths))
        settings = {name: x for name, x in bound.kwargs.items() if name != "return_residuals"}
        # P = exp(s - top) / total: any LSE is a maximum with a sum of 1.
        operands = ((lse, jnp.ones_like(lse)), out, dout, *bound.args)
        op = backward_module().PallasMosaicGpuFlashAttentionVjp()
        config = op._get_heuristics_config(op.bind(*operands, **settings))
        grads = replace(op, config=config)(*operands, **settings)
        return grads["q"], grads["k"], grads["v"]


def _tokamax(module: str) -> Any:
    return import_module(f"tokamax._src.ops.attention.{module}")  # an extra, and slow to import


def _configured(q: Array, k: Array, v: Array, scale: float, mask: Any) -> Any:
    """Bind the operands to tokamax's forward, with block sizes: looking them up in its tables warns
    on an H200.
    """
    gpu = _tokamax("pallas_mosaic_gpu")
    op = gpu.PallasMosaicGpuFlashAttention()
    bound = op.bind(q, k, v, logits_scale=scale, mask=mask)
    if q.shape[3] <= SHORT_HEAD and k.shape[1] <= SHORT_KEYS and not mask:
        config = gpu.ConfigSM90(block_q=128, block_kv=128, num_stages=2, persistent=True)
    else:
        config = op._get_heuristics_config(bound)
    return replace(op, config=config).bind(q, k, v, logits_scale=scale, mask=mask)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split(".")[:3] if x.isdigit())


def _refuse_rows(parts: fused_masks.Parts) -> Reason | None:
    """Refuse masks of positions that show a query more than one interval of keys."""
    mask: Mask = Full()
    for term in parts.positions:
        mask = mask & term
    if len(mask.intervals(np.zeros(1, np.int32))) == 1:
        return None
    rule = f"it takes one interval of keys for each query, and {mask} can have several"
    return Reason("tokamax_flash", "mask", rule, fused_masks.REMEDY)


def _takes_intervals(parts: fused_masks.Parts, q_offset: Offset, kv_offset: Offset) -> bool:
    """Tell whether a mask goes in as intervals: all with positions do, but for triangles, which the
    backward skips.
    """
    triangle = parts.band is not None and parts.band.left is None
    traced = isinstance(q_offset, jax.Array) or isinstance(kv_offset, jax.Array)
    return bool(parts.positions) and (traced or not triangle)


def _intervals(
    mask: Mask, q: Array, k: Array, q_offset: Offset, kv_offset: Offset
) -> tuple[Piece, Pairs]:
    """Return each query's interval of local keys as [B or 1, T] ends."""
    parts = fused_masks.split(mask)
    t, s = q.shape[1], k.shape[1]
    positions: Mask = Full()
    for term in parts.positions:
        positions = positions & term
    ((lo, hi),) = positions.intervals(jnp.arange(t, dtype=jnp.int32) + q_offset, jnp)
    lo, hi = (jnp.clip(end - kv_offset, 0, s)[None] for end in (lo, hi))
    lengths = fused_masks.lengths_of(parts, q.shape[0], s, kv_offset)
    if lengths is not None:
        hi = jnp.minimum(hi, lengths[:, None])
    return Piece(0, t, 0, s), Pairs(lo, hi, None, None)


def _seen(pairs: Pairs) -> Array:
    assert pairs.lo is not None and pairs.hi is not None
    return pairs.lo < pairs.hi


def _mask(piece: Piece, lengths: Lengths) -> Any:
    ranges = _tokamax("base").Mask
    if isinstance(lengths, Pairs):
        assert lengths.lo is not None and lengths.hi is not None
        # A query without keys is shown one; what it gives is replaced.
        hi = jnp.maximum(lengths.hi, lengths.lo + 1)
        return ranges(k_start=lengths.lo[:, None], k_end=hi[:, None])
    ends = None if lengths is None else jnp.maximum(lengths, 1)[:, None, None]
    return ranges(k_end=ends, is_causal=not piece.is_full)
