"""FlashAttention-4 through the primitives of fa4-jax, which return a float32 LSE and take a given
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

# The kernels look the mask's arrays up for whole tiles, past the last query and key.
TILE = 256


def _fa4() -> Any:
    return import_module(
        "fa4_jax.attention"
    )  # an extra: it need not be there when this module is read


@cache
def _pairs_type() -> Any:
    """Make the mask that tests intervals and ids; fa4-jax is imported here, since it is an
    extra.
    """
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


def _mask_of(pairs: Any) -> tuple[Any, list[Array]]:
    """Return fa4-jax's (mask structure, arrays) of `Pairs`, or (None, [])."""
    if pairs is None:
        return None, []
    found = [x for x in (pairs.lo, pairs.hi, pairs.q_ids, pairs.kv_ids) if x is not None]
    arrays = tuple(jnp.pad(x.astype(jnp.int32), ((0, 0), (0, TILE))) for x in found)
    count = 0 if pairs.lo is None else pairs.lo.shape[0]
    leaves, structure = jax.tree.flatten(_pairs_type()(count, pairs.q_ids is not None, arrays))
    return structure, leaves


def _config(band: tuple[int | None, int | None], scale: float, mask: Any, varlen: bool) -> Any:
    left, right = band
    causal = left is None and right == 0
    local = not causal and (left is not None or right is not None)
    window = (left, right) if local else (None, 0) if causal else (None, None)
    return _fa4().AttnConfig(causal, local, window, float(scale), mask, "cute", varlen, varlen)


def fa4_forward(
    q: Array, k: Array, v: Array, band: tuple[int | None, int | None], pairs: Any, scale: float
) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T]).

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16.
        band: (left, right) of `query - left <= key - (S - T) <= query + right`; None: without a
            bound.
        pairs: `Pairs` that are tested inside, or None.
        scale: multiplies the scores.
    """
    mask, arrays = _mask_of(pairs)
    out, lse = _fa4().fa4_fwd_p.bind(
        q, k, v, *arrays, cfg=_config(band, scale, mask, False), need_lse=True
    )
    return out, lse


def fa4_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    band: tuple[int | None, int | None],
    pairs: Any,
    scale: float,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) from a given output and LSE; arguments as for `fa4_forward`."""
    mask, arrays = _mask_of(pairs)
    config = _config(band, scale, mask, False)
    width = q.shape[-1]
    q, k, v, out, dout = (widened(x) for x in (q, k, v, out, dout))
    grads = _fa4().fa4_vjp_p.bind(q, k, v, out, lse, dout, *arrays, cfg=config, has_d_lse=False)
    dq, dk, dv = (x[..., :width] for x in grads)
    return dq, dk, dv


def fa4_forward_lengths(
    q: Array, k: Array, v: Array, lengths: Array, scale: float
) -> tuple[Array, Array]:
    """Return (out, lse) over the first `lengths[b]` keys of each batch row."""
    ends = _ends(q, k, lengths)
    config = _config((None, None), scale, None, True)
    out, lse = _fa4().fa4_fwd_p.bind(
        *(_flat(x) for x in (q, k, v)), *ends, cfg=config, need_lse=True
    )
    return out.reshape(q.shape), lse.reshape(-1, q.shape[0], q.shape[1]).swapaxes(0, 1)


def fa4_backward_lengths(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, lengths: Array, scale: float
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv) over the first `lengths[b]` keys of each batch row."""
    config = _config((None, None), scale, None, True)
    rows = lse.swapaxes(0, 1).reshape(lse.shape[1], -1)
    flat = [widened(_flat(x)) for x in (q, k, v, out, dout)]
    operands = (*flat[:4], rows, flat[4], *_ends(q, k, lengths))
    grads = _fa4().fa4_vjp_p.bind(*operands, cfg=config, has_d_lse=False)
    dq, dk, dv = (x[..., : q.shape[-1]] for x in grads)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def widened(x: Array) -> Array:
    """Make an operand of the backward: an array of its own, its head dim one that the kernels
    compile for on Hopper.

    XLA hands slices to a custom call without a copy, but then forgets which results share the
    memory of which operands (jax 0.11.2): the float32 sums, which the kernel adds to in place,
    would begin as garbage.
    """
    width = x.shape[-1]
    extra = 0 if width <= 128 else -width % 64  # 192 or 256: 0.1.0 fails at 160
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, extra),)) if extra else x
    return jax.lax.optimization_barrier(x)


def _flat(x: Array) -> Array:
    return x.reshape(-1, *x.shape[2:])


def _ends(q: Array, k: Array, lengths: Array) -> tuple[Array, Array, Array, Array]:
    """Say where each batch row begins and how many of its queries and keys are real."""
    rows = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    queries = jnp.full(q.shape[0], q.shape[1], jnp.int32)
    return rows * q.shape[1], rows * k.shape[1], queries, lengths.astype(jnp.int32)
