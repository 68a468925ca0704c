"""FlashAttention-4 on GPUs other than Hopper, launched by fa4-jax's own primitives.

The library computes all pairs, key lengths, windows whose last query is aligned with the last key,
and a test of pairs. A band becomes a window. Any other mask is tested pair by pair in the narrowest
window that contains the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.kernels import base
from maxattn.kernels.base import Grads, Inputs, Result, Rows, padded_rows, widened
from maxattn.kernels.fa4 import library
from maxattn.kernels.fa4.lists import PAD, intervals
from maxattn.kernels.fa4.mask_test import PairTest
from maxattn.kernels.fa4.problem import Problem
from maxattn.kernels.fa4.tiles import kernel_width
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks.band_pieces import Piece, pieces
from maxattn.masks.terms import segment_ids, sort_terms, supported_split

Window = tuple[int | None, int | None]
"""(left, right) of `query - left <= key - (S - T) <= query + right`; None is unbounded."""


class View(NamedTuple):
    """The part of a call that the library computes: queries, keys, a window and a test of pairs."""

    # q0, q1, k0, k1: the ranges [q0, q1) of queries and [k0, k1) of keys
    q0: int
    q1: int
    k0: int
    k1: int
    window: Window = (None, None)  # (left, right) within these ranges
    # mask, arrays: fa4-jax's mask that tests a pair, and the arrays that it reads
    mask: Any = None
    arrays: tuple[Array, ...] = ()


def forward(p: Problem, inputs: Inputs, scale: float) -> Result:
    """Return (out, lse); out is 0 and lse is -inf for queries that see no key."""
    if p.kind == "lengths":
        return _lengths_forward(inputs, scale)
    view = view_of(p, inputs)
    q, k, v = _cut(view, inputs)
    bind, config = library.attention().fa4_fwd_p.bind, _config(view, scale)
    out, lse = bind(q, k, v, *view.arrays, cfg=config, need_lse=True)
    around = (view.q0, p.q_len - view.q1)
    out = jnp.pad(out, ((0, 0), around, (0, 0), (0, 0)))
    return Result(out, jnp.pad(lse, ((0, 0), (0, 0), around), constant_values=NEG_INF))


def backward(p: Problem, inputs: Inputs, rows: Rows, scale: float, lse_gradient: bool) -> Grads:
    """Return (dq, dk, dv), with heads padded to a head dim that the library has a backward for."""
    width = inputs.q.shape[3]
    q, k, v = (widened(x, kernel_width(width)) for x in (inputs.q, inputs.k, inputs.v))
    inputs, rows = inputs.replace(q=q, k=k, v=v), padded_rows(rows, q)
    grads = _backward(p, inputs, rows, scale)
    if lse_gradient:
        both = partial(forward, p, scale=scale), partial(_backward, p, scale=scale)
        grads = base.with_lse_gradient(grads, inputs, rows, scale, *both)
    return Grads(*(x[..., :width] for x in grads[:3]))


def _backward(p: Problem, inputs: Inputs, rows: Rows, scale: float) -> Grads:
    if p.kind == "lengths":
        return _lengths_backward(inputs, rows, scale)
    view = view_of(p, inputs)
    q, k, v = _cut(view, inputs)
    span = slice(view.q0, view.q1)
    operands = q, k, v, rows.out[:, span], rows.lse[:, :, span], rows.dout[:, span]
    bind, config = library.attention().fa4_vjp_p.bind, _config(view, scale)
    operands = (jax.lax.optimization_barrier(x) for x in operands)
    dq, dk, dv = bind(*operands, *view.arrays, cfg=config, has_d_lse=False)
    of_keys = (view.k0, p.kv_len - view.k1)
    sizes = (view.q0, p.q_len - view.q1), of_keys, of_keys
    return Grads(
        *(
            jnp.pad(x, ((0, 0), around, (0, 0), (0, 0)))
            for x, around in zip((dq, dk, dv), sizes, strict=True)
        )
    )


def _cut(view: View, inputs: Inputs) -> tuple[Array, ...]:
    keys = slice(view.k0, view.k1)
    return inputs.q[:, view.q0 : view.q1], inputs.k[:, keys], inputs.v[:, keys]


def _config(view: View, scale: float, varlen: bool = False) -> Any:
    causal = view.window == (None, 0)
    local = not causal and view.window != (None, None)
    settings = library.attention().AttnConfig
    return settings(causal, local, view.window, float(scale), view.mask, "cute", varlen, varlen)


# ---- windows and tests ---------------------------------------------------------------------------


def view_of(p: Problem, inputs: Inputs) -> View:
    """Return the ranges, the window and the test of pairs that compute a call's mask."""
    t, s = p.q_len, p.kv_len
    if p.kind == "dense":
        return View(0, t, 0, s)
    band = sort_terms(inputs.mask).band
    if p.kind == "known" and band is not None:
        return _trimmed(_piece(pieces(band, p.offsets[0] - p.offsets[1] + band.offset, t, s), t, s))
    split, at = supported_split(inputs.mask), (inputs.q_offset, inputs.kv_offset)
    ids = segment_ids(split, p.batch, t, s, at[1]) or ()
    ends = () if split.positions.is_full else intervals(split.positions, p, at)
    around = _around(*ends, t, s) if ends else Piece(0, t, 0, s)
    arrays = tuple(jnp.pad(jnp.asarray(x, jnp.int32), ((0, 0), (0, PAD))) for x in (*ends, *ids))
    test = PairTest(intervals=len(ends[0]) if ends else 0, has_ids=bool(ids))
    leaves, mask = jax.tree.flatten(_pairs_mask()(test, arrays))
    # The arrays cover all queries and keys, so that neither are cut. A window that leaves some out
    # has a negative side, which the library refuses; this side is left unbounded.
    moved = (around.left, s - t), (around.right, t - s)
    left, right = (None if x is None or x + by < 0 else x + by for x, by in moved)
    return View(0, t, 0, s, (left, right), mask, tuple(leaves))


def _piece(found: tuple[Piece, ...], t: int, s: int) -> Piece:
    """Merge the pieces of a band, in which a block of full keys may precede a triangle."""
    if len(found) == 2:
        return Piece(0, t, 0, s, None, found[0].k1)
    return found[0] if found else Piece(0, 0, 0, 0)


def _trimmed(p: Piece) -> View:
    """Cut last keys that no query sees and last queries that see no key: no side is negative."""
    t, s = p.q1 - p.q0, p.k1 - p.k0
    if p.right is not None:
        s = min(s, t + p.right)
    if p.left is not None:
        t = min(t, s + p.left)
    move = s - t
    left = None if p.left is None else p.left + move
    right = None if p.right is None else p.right - move
    return View(p.q0, p.q0 + t, p.k0, p.k0 + s, (left, right))


def _around(lo: Any, hi: Any, t: int, s: int) -> Piece:
    """Return the narrowest band around intervals [M, T]; sides that exclude no pair are None."""
    if isinstance(lo, jax.Array) or not (some := lo < hi).any():
        return Piece(0, t, 0, s)
    row = np.broadcast_to(np.arange(t), lo.shape)[some]
    left, right = int((row - lo[some]).max()), int((hi[some] - 1 - row).max())
    return Piece(0, t, 0, s, left if left < t - 1 else None, right if right < s - 1 else None)


def share_of_window(p: Problem) -> float:
    """Return the share of all pairs that is in the narrowest window around a mask."""
    t, s = p.q_len, p.kv_len
    if p.mask.is_full:
        return 1.0
    around, at = _around(*intervals(p.mask, p, p.offsets), t, s), np.arange(t)
    first = 0 if around.left is None else np.maximum(at - around.left, 0)
    last = s if around.right is None else np.minimum(at + around.right + 1, s)
    return float(np.maximum(last - first, 0).sum()) / (t * s)


@cache
def _pairs_mask() -> Any:
    """Return a subclass of fa4-jax's `MaskMod` that evaluates a `PairTest`."""
    masks = import_module("fa4_jax.masks")

    @dataclass(frozen=True)
    class PairsMask(masks.MaskMod):
        test: PairTest = masks.static()  # noqa: RUF009
        arrays: tuple[Any, ...] = ()

        def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return self.test(b, q_idx, kv_idx, self.arrays, None)

    return PairsMask


# ---- lengths -------------------------------------------------------------------------------------


def _lengths_forward(inputs: Inputs, scale: float) -> Result:
    q, ends = inputs.q, _ends(inputs)
    flat = [_flat(x) for x in (q, inputs.k, inputs.v)]
    config = _config(View(0, 0, 0, 0), scale, varlen=True)
    out, lse = library.attention().fa4_fwd_p.bind(*flat, *ends, cfg=config, need_lse=True)
    out, lse = out.reshape(q.shape), lse.reshape(-1, q.shape[0], q.shape[1]).swapaxes(0, 1)
    return Result(out, lse).where(ends[3][:, None, None] > 0)


def _lengths_backward(inputs: Inputs, rows: Rows, scale: float) -> Grads:
    q, k, v = inputs.q, inputs.k, inputs.v
    config = _config(View(0, 0, 0, 0), scale, varlen=True)
    lse = rows.lse.swapaxes(0, 1).reshape(rows.lse.shape[1], -1)
    barrier = jax.lax.optimization_barrier
    flat = [barrier(_flat(x)) for x in (q, k, v, rows.out, rows.dout)]
    operands = (*flat[:4], lse, flat[4], *_ends(inputs))
    grads = library.attention().fa4_vjp_p.bind(*operands, cfg=config, has_d_lse=False)
    return Grads(*(x.reshape(y.shape) for x, y in zip(grads, (q, k, v), strict=True)))


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _ends(inputs: Inputs) -> tuple[Array, Array, Array, Array]:
    """Return the batch rows' starts in flat q and flat k, their query counts and key lengths."""
    (batch, t), s = inputs.q.shape[:2], inputs.k.shape[1]
    lengths = sort_terms(inputs.mask).lengths(batch, s, inputs.kv_offset)
    assert lengths is not None
    rows = jnp.arange(batch + 1, dtype=jnp.int32)
    return rows * t, rows * s, jnp.full(batch, t, jnp.int32), lengths.astype(jnp.int32)
