"""FlashAttention-4 through the primitives of fa4-jax: a float32 LSE comes out, and goes in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.base import Grads, Result, Rows
from maxattn.kernels.fa4 import wide_heads
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.tile_sizes import kernel_width
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs

Window = tuple[int | None, int | None]
"""(left, right) of `query - left <= key - (S - T) <= query + right`; None: without a bound."""
NO_WINDOW: Window = (None, None)
# The kernels look the mask's arrays up for whole tiles, past the last query and key.
TILE = 256


def _fa4() -> Any:
    library()  # before any kernel of it is made
    return import_module("fa4_jax.attention")  # an extra: it may be missing when this file is read


@cache
def _pairs_type() -> Any:
    """Make the mask that tests intervals and ids, a class of fa4-jax's."""
    masks = import_module("fa4_jax.masks")

    @dataclass(frozen=True)
    class PairsMask(masks.MaskMod):
        """Evaluate `Pairs` inside the kernel: arrays of int32, and which of them there are."""

        intervals: int = masks.static()
        has_ids: bool = masks.static()
        arrays: tuple[Any, ...] = ()

        def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            """Tell whether a query may attend to a key."""
            ok: Any = None
            arrays = self.arrays
            for m in range(self.intervals):
                lo, hi = arrays[0], arrays[1]
                inside = (kv_idx >= lo[m, q_idx]) & (kv_idx < hi[m, q_idx])
                ok = inside if ok is None else ok | inside
            if self.has_ids:
                q_ids, kv_ids = arrays[-2], arrays[-1]
                same = q_ids[b, q_idx] == kv_ids[b, kv_idx]
                ok = same if ok is None else ok & same
            return ok

    return PairsMask


def _mask_of(pairs: Pairs | None) -> tuple[Any, list[Array]]:
    """Return fa4-jax's (mask structure, arrays) of `Pairs`, or (None, [])."""
    if pairs is None:
        return None, []
    found = [x for x in (pairs.lo, pairs.hi, pairs.q_ids, pairs.kv_ids) if x is not None]
    arrays = tuple(jnp.pad(x.astype(jnp.int32), ((0, 0), (0, TILE))) for x in found)
    count = 0 if pairs.lo is None else pairs.lo.shape[0]
    leaves, structure = jax.tree.flatten(_pairs_type()(count, pairs.q_ids is not None, arrays))
    return structure, leaves


def _config(window: Window, scale: float, mask: Any = None, varlen: bool = False) -> Any:
    causal = window == (None, 0)
    local = not causal and window != NO_WINDOW
    return _fa4().AttnConfig(causal, local, window, float(scale), mask, "cute", varlen, varlen)


def fa4_forward(inputs: PieceInputs, window: Window, scale: float) -> Result:
    """Return (out, lse).

    Args:
        inputs: bfloat16 or float16; of its piece nothing is read, of `Pairs` what they test.
        window: allows pairs too.
        scale: multiplies the scores.
    """
    mask, arrays = _mask_of(inputs.pairs)
    operands, config = (inputs.q, inputs.k, inputs.v, *arrays), _config(window, scale, mask)
    return Result(*_fa4().fa4_fwd_p.bind(*operands, cfg=config, need_lse=True))


def fa4_backward(
    inputs: PieceInputs, rows: Rows, window: Window, scale: float, launched: bool = False
) -> Grads:
    """Return (dq, dk, dv) from a given output and LSE.

    Args:
        inputs, window, scale: as for `fa4_forward`.
        rows: of the queries.
        launched: whether maxattn launches the library's kernels, where it has none for this head.
    """
    mask, arrays = _mask_of(inputs.pairs)
    config, width = _config(window, scale, mask), inputs.q.shape[-1]
    if launched and wide_heads.takes(inputs.q):
        return wide_heads.backward((inputs.q, inputs.k, inputs.v, *arrays), rows, config)
    arrays_in = inputs.q, inputs.k, inputs.v, rows.out, rows.dout
    q, k, v, out, dout = (widened(x) for x in arrays_in)
    operands = (q, k, v, out, rows.lse, dout, *arrays)
    grads = _fa4().fa4_vjp_p.bind(*operands, cfg=config, has_d_lse=False)
    return Grads(*(x[..., :width] for x in grads))


def fa4_forward_lengths(inputs: PieceInputs, scale: float) -> Result:
    """Return (out, lse) over the first `lengths[b]` keys of each batch row."""
    q, ends, config = inputs.q, _ends(inputs), _config(NO_WINDOW, scale, varlen=True)
    flat = [_flat(x) for x in (q, inputs.k, inputs.v)]
    out, lse = _fa4().fa4_fwd_p.bind(*flat, *ends, cfg=config, need_lse=True)
    lse = lse.reshape(-1, q.shape[0], q.shape[1]).swapaxes(0, 1)
    return Result(out.reshape(q.shape), lse)


def fa4_backward_lengths(inputs: PieceInputs, rows: Rows, scale: float) -> Grads:
    """Return (dq, dk, dv) over the first `lengths[b]` keys of each batch row."""
    config, (q, k, v) = _config(NO_WINDOW, scale, varlen=True), (inputs.q, inputs.k, inputs.v)
    lse = rows.lse.swapaxes(0, 1).reshape(rows.lse.shape[1], -1)
    flat = [widened(_flat(x)) for x in (q, k, v, rows.out, rows.dout)]
    operands = (*flat[:4], lse, flat[4], *_ends(inputs))
    grads = _fa4().fa4_vjp_p.bind(*operands, cfg=config, has_d_lse=False)
    dq, dk, dv = (x[..., : q.shape[-1]] for x in grads)
    return Grads(dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape))


def widened(x: Array) -> Array:
    """Make an operand of the library's backward: an array of its own, of a head dim it takes."""
    width = x.shape[-1]
    extra = kernel_width(width) - width
    return own_array(jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) if extra else x)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _ends(inputs: PieceInputs) -> tuple[Array, Array, Array, Array]:
    """Say where each batch row begins and how many of its queries and keys are real."""
    (batch, t), s, lengths = inputs.q.shape[:2], inputs.k.shape[1], inputs.lengths
    assert lengths is not None and not isinstance(lengths, Pairs)
    rows = jnp.arange(batch + 1, dtype=jnp.int32)
    queries = jnp.full(batch, t, jnp.int32)
    return rows * t, rows * s, queries, lengths.astype(jnp.int32)
