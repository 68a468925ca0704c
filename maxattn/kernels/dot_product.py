"""Dense attention: one matmul, one softmax, one matmul; the fastest for short sequences.

It computes all [B, N, T, S] scores at once, so its memory grows with T * S. The backward recomputes
the scores from the saved LSE: no array of T * S is kept between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels import softmax
from maxattn.kernels.base import Grads, Inputs, Kernel, Lines, Result, Rows, Tangents
from maxattn.target import Target


@dataclass(frozen=True)
class DotProduct(Kernel):
    """Compute out = softmax(scale * q k^T + bias) v with XLA's own matmuls."""

    name: ClassVar[str] = "dot_product"
    differentiates_twice: ClassVar[bool] = True
    takes_value_dim: ClassVar[bool] = True
    scale: float  # factor of the scores, in float32
    # whether to cast q and k to float32 before their product. Products of bfloat16 and float16 are
    # exact in float32 without the cast too.
    float32_qk_product: bool = False
    # whether batch and heads stay two axes or become one; results are equal
    split_head_dim: bool = True

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> DotProduct:
        return DotProduct(call.scale, config.float32_qk_product, config.split_head_dim)

    def forward(self, inputs: Inputs) -> Result:
        q, v = inputs.q, inputs.v
        qs, ks, vs = self._split(inputs)
        s = self._scores(qs, ks, inputs)
        # The result does not depend on m, so m's derivative is cut off. That derivative compares s
        # with m, and would be NaN if XLA computed s twice with different rounding.
        m = jnp.max(jax.lax.stop_gradient(s), axis=-1)
        p = softmax.stable_exp(s, m)
        # [B, K, G, T, S], [B, K, S, H] -> [B, K, G, T, H]
        acc = softmax.matmul("bkgts,bksh->bkgth", p.astype(v.dtype), vs)
        out, lse = softmax.finish(m, jnp.sum(p, axis=-1), acc)
        lse = lse.reshape(q.shape[0], q.shape[2], q.shape[1])
        return Result(self._merge_queries(out, q).astype(q.dtype), lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        q, k, bias = inputs.q, inputs.k, inputs.bias
        qs, ks, vs = self._split(inputs)
        stats = (softmax.split_stats(x, k.shape[2]) for x in (rows.lse, rows.dlse))
        split = (softmax.split_queries(x, k.shape[2]) for x in (rows.out, rows.dout))
        lse, delta, dout = (self._fold(x) for x in softmax.row_gradient(*split, *stats))
        s = self._scores(qs, ks, inputs)
        dq, dk, dv, ds = softmax.tile_gradient(qs, ks, vs, s, lse, delta, dout, self.scale)
        dbias = None
        if bias is not None:
            full = ds.reshape(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            dbias = softmax.fold_like(full, bias.shape)
        dq = self._merge_queries(dq, q).astype(softmax.gradient_dtype(q))
        return Grads(dq, self._merge_keys(dk, k), self._merge_keys(dv, k), dbias)

    def tangent(self, inputs: Inputs, result: Result, moved: Tangents) -> Result:
        q, kv_heads = inputs.q, inputs.k.shape[2]
        qs, ks, vs = self._split(inputs)
        dq = None if moved.q is None else self._fold(softmax.split_queries(moved.q, kv_heads))
        dk, dv = (
            None if x is None else self._fold(softmax.split_keys(x)) for x in (moved.k, moved.v)
        )
        dbias = None if moved.bias is None else self._fold_mask(moved.bias, inputs)
        lse = softmax.finite(result.lse)
        lse = self._fold(softmax.split_stats(lse, kv_heads))
        ds = softmax.score_tangent(qs, ks, dq, dk, dbias, self.scale)
        none = jnp.full_like(lse, jnp.inf), jnp.zeros_like(lse), jnp.float32(0)
        s = self._scores(qs, ks, inputs)
        centre, dlse, acc = softmax.tile_tangent(s, ds, lse, vs, dv, none)
        out = self._fold(softmax.split_queries(result.out, kv_heads)).astype(jnp.float32)
        dout = self._merge_queries(acc - out * dlse[..., None], q).astype(q.dtype)
        dlse = dlse + softmax.known_centre(centre)
        return Result(dout, dlse.reshape(result.lse.shape))

    def microseconds(self, call: Call, target: Target) -> None:
        """Return None: XLA's matmuls reach neither the peak FLOP/s nor the peak bandwidth."""

    def lines(self, call: Call) -> Lines:
        return Lines("dot_product (XLA dense)", "none: all T x S scores at once")

    def _scores(self, qs: Array, ks: Array, inputs: Inputs) -> Array:
        allowed = None
        if not inputs.mask.is_full:
            q_idx, kv_idx = jnp.arange(inputs.q.shape[1]), jnp.arange(inputs.k.shape[1])
            allowed = inputs.mask.allowed(q_idx, kv_idx, inputs.q_offset, inputs.kv_offset)
            allowed = self._fold_mask(allowed, inputs)
        given = inputs.bias, inputs.bias_level
        bias, level = (None if x is None else self._fold_mask(x, inputs) for x in given)
        if self.float32_qk_product:
            qs, ks = qs.astype(jnp.float32), ks.astype(jnp.float32)
        return softmax.scores(qs, ks, self.scale, bias, level, allowed)

    # With split_head_dim=False, [B, K, ...] is reshaped to [B*K, 1, ...].

    def _fold(self, x: Array) -> Array:
        return x if self.split_head_dim else x.reshape(-1, 1, *x.shape[2:])

    def _fold_mask(self, x: Any, inputs: Inputs) -> Array:
        x = softmax.split_heads(x, inputs.k.shape[2])
        if self.split_head_dim or (x.shape[0] == 1 and x.shape[1] == 1):
            return x
        full = jnp.broadcast_to(x, (inputs.q.shape[0], inputs.k.shape[2], *x.shape[2:]))
        return full.reshape(-1, 1, *x.shape[2:])

    def _split(self, inputs: Inputs) -> tuple[Array, Array, Array]:
        qs = softmax.split_queries(inputs.q, inputs.k.shape[2])
        ks, vs = (self._fold(softmax.split_keys(x)) for x in (inputs.k, inputs.v))
        return self._fold(qs), ks, vs

    def _merge_queries(self, x: Array, q: Array) -> Array:
        (b, t, n, _), h = q.shape, x.shape[-1]  # h is the head dim of q or of v
        return softmax.merge_queries(x.reshape(b, -1, x.shape[2], t, h)).reshape(b, t, n, h)

    def _merge_keys(self, x: Array, k: Array) -> Array:
        b, s, kv_heads, _ = k.shape
        return softmax.merge_keys(x.reshape(b, kv_heads, s, x.shape[-1]))
