"""tokamax's Pallas Mosaic kernels: `tokamax_flash` on NVIDIA GPUs.

The kernels take masks with one interval of keys per query: bands, block windows and lengths, at any
offset. The forward skips tiles outside the intervals. The backward skips tiles only under a causal
mask; under other masks, the backward computes every tile and masks its scores.

Source: openxla/tokamax, PallasMosaicGpuFlashAttention and its VJP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import and_
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.versions import TOKAMAX_ON_GPU, numbers
from maxattn.kernels.base import (
    USE_AUTO,
    Grads,
    Inputs,
    Lines,
    Result,
    Rows,
    in_default_modes,
    refuse_call,
    refuse_mask,
)
from maxattn.kernels.fused.kernel import Fused
from maxattn.kernels.fused.rectangles import Intervals, PieceInputs
from maxattn.kernels.fused.tokamax_fence import backward_module
from maxattn.kernels.refusals import refuse_bias
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Full, Mask
from maxattn.masks.terms import Terms, sort_terms
from maxattn.target import Target

HEAD_LIMIT = 256
# With a single key tile, query tiles of 128 took 0.094 ms instead of 0.106 for SDXL's text
# (H200; B=16 T=4096 S=77 N=10 H=64).
SHORT_HEAD, SHORT_KEYS = 64, 128


@dataclass(frozen=True)
class TokamaxMosaic(Fused):
    """Compute out = softmax(scale * q k^T) v with tokamax's Mosaic GPU kernels."""

    name: ClassVar[str] = "tokamax_flash"
    version: str = ""  # the version of tokamax

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse old versions, GPUs but Hopper, float16, a bias, several intervals per query."""
        version = target.version("tokamax") or ""
        if numbers(version) < numbers(TOKAMAX_ON_GPU):
            this = f"this is {version}" if version else "tokamax is not installed"
            rule = f"it needs tokamax {TOKAMAX_ON_GPU} or newer on a GPU, and {this}"
            remedy = f'pip install "tokamax>={TOKAMAX_ON_GPU}"'
            return Reason("tokamax_flash", "package", rule, remedy)
        if not target.device.is_a("hopper"):
            rule = f"its backward is for Hopper GPUs, and this is {target.device_kind}"
            return Reason("tokamax_flash", "device", rule, "set attention: auto")
        reason = target.refuse_untested("tokamax_flash", "tokamax")
        if reason is None and call.dtype == "float16":
            # The LSE of padded queries is garbage: exp(0 - lse) overflows float16, and inf * 0
            # reaches dK (H200, 3 to 17 queries, tokamax 0.0.17).
            rule = "its backward overflows in float16 if the last query tile is not full"
            remedy = "use bfloat16, or set attention: auto"
            return Reason("tokamax_flash", "dtype float16", rule, remedy)
        reason = reason or refuse_call("tokamax_flash", call, HEAD_LIMIT)
        reason = reason or refuse_bias("tokamax_flash", call, USE_AUTO)
        terms = sort_terms(call.mask)
        reason = reason or refuse_mask("tokamax_flash", terms, rows=True)
        if reason is None and len(_positions(terms).intervals(np.zeros(1, np.int32))) != 1:
            can = f"{_positions(terms)} can have several"
            rule = f"it takes one interval of keys per query, and {can}"
            return Reason("tokamax_flash", "mask", rule, USE_AUTO)
        return reason

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> TokamaxMosaic:
        return TokamaxMosaic(call.scale, call.return_lse, target.version("tokamax") or "")

    def lines(self, call: Call) -> Lines:
        runs = f"tokamax_flash (tokamax {self.version}, Mosaic GPU)"
        own = "the library's own"
        return Lines(runs, own, f"{own}, with a memory fence added")

    def forward(self, inputs: Inputs) -> Result:
        if not _takes_intervals(inputs):
            return super().forward(inputs)
        given = _intervals(inputs)
        return self.piece_forward(given).where(_seen(given)[:, None])

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        if not _takes_intervals(inputs):
            return super().backward(inputs, rows)
        given, dtype = _intervals(inputs), inputs.q.dtype
        seen = _seen(given)
        dout = jnp.where(seen[..., None, None], rows.dout, 0).astype(dtype)
        lse = jnp.where(seen[:, None], rows.lse, NEG_INF)
        dq, dk, dv, _ = self._backward(given, Rows(rows.out.astype(dtype), lse, dout, rows.dlse))
        return Grads(dq.astype(dtype), dk, dv)

    def piece_forward(self, inputs: PieceInputs) -> Result:
        out, (top, total) = in_default_modes(_forward)(inputs, self.scale)
        return Result(out, top + jnp.log(total))

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        grads = in_default_modes(_backward)(inputs, rows, self.scale)
        return Grads(grads["q"], grads["k"], grads["v"])


def _tokamax(module: str) -> Any:
    return import_module(f"tokamax._src.ops.attention.{module}")  # optional, and slow to import


def _forward(inputs: PieceInputs, scale: float) -> Any:
    """Return tokamax's (out, (maximum, sum)) of one rectangle."""
    bound = _configured(inputs, scale)
    return bound.op(*bound.args, **bound.kwargs | {"return_residuals": True})


def _backward(inputs: PieceInputs, rows: Rows, scale: float) -> Any:
    """Return tokamax's gradients of one rectangle, by name."""
    bound = _configured(inputs, scale)
    settings = {name: x for name, x in bound.kwargs.items() if name != "return_residuals"}
    # tokamax computes P = exp(s - top) / total: pass the LSE as top, with a total of 1.
    operands = ((rows.lse, jnp.ones_like(rows.lse)), rows.out, rows.dout, *bound.args)
    op = backward_module().PallasMosaicGpuFlashAttentionVjp()
    config = op._get_heuristics_config(op.bind(*operands, **settings))
    return replace(op, config=config)(*operands, **settings)


def _configured(inputs: PieceInputs, scale: float) -> Any:
    """Bind operands to tokamax's forward with heuristic block sizes: its tables warn on an H200."""
    gpu, mask, q, k = _tokamax("pallas_mosaic_gpu"), _mask(inputs), inputs.q, inputs.k
    op = gpu.PallasMosaicGpuFlashAttention()
    bound = op.bind(q, k, inputs.v, logits_scale=scale, mask=mask)
    if q.shape[3] <= SHORT_HEAD and k.shape[1] <= SHORT_KEYS and not mask:
        config = gpu.ConfigSM90(block_q=128, block_kv=128, num_stages=2, persistent=True)
    else:
        config = op._get_heuristics_config(bound)
    return replace(op, config=config).bind(q, k, inputs.v, logits_scale=scale, mask=mask)


def _positions(terms: Terms) -> Mask:
    return reduce(and_, terms.positions, Full())


def _takes_intervals(inputs: Inputs) -> bool:
    # A causal mask at known positions is passed as such, so that the backward skips tiles.
    terms = sort_terms(inputs.mask)
    triangle = terms.band is not None and terms.band.left is None
    traced = any(isinstance(x, jax.Array) for x in (inputs.q_offset, inputs.kv_offset))
    return bool(terms.positions) and (traced or not triangle)


def _intervals(inputs: Inputs) -> PieceInputs:
    """Return the whole call as inputs with each query's interval of local keys, [B or 1, T]."""
    terms = sort_terms(inputs.mask)
    q, k, kv_offset = inputs.q, inputs.k, inputs.kv_offset
    t, s = q.shape[1], k.shape[1]
    rows = jnp.arange(t, dtype=jnp.int32) + inputs.q_offset
    ((lo, hi),) = _positions(terms).intervals(rows, jnp)
    lo, hi = (jnp.clip(end - kv_offset, 0, s)[None] for end in (lo, hi))
    lengths = terms.lengths(q.shape[0], s, kv_offset)
    if lengths is not None:
        hi = jnp.minimum(hi, lengths[:, None])
    return PieceInputs.whole(q, k, inputs.v, Intervals(lo, hi))


def _seen(inputs: PieceInputs) -> Array:
    assert isinstance(inputs.lengths, Intervals)
    return inputs.lengths.lo < inputs.lengths.hi


def _mask(inputs: PieceInputs) -> Any:
    ranges = _tokamax("base").Mask
    if isinstance(inputs.lengths, Intervals):
        lo, hi = inputs.lengths
        # A query without keys gets one key, and its result is replaced.
        return ranges(k_start=lo[:, None], k_end=jnp.maximum(hi, lo + 1)[:, None])
    ends = None if inputs.lengths is None else jnp.maximum(inputs.lengths, 1)[:, None, None]
    return ranges(k_end=ends, is_causal=not inputs.piece.is_full)
