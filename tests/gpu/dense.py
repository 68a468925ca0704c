"""A library of one dense function with the contract of the GPU libraries, so that what is around
them runs anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from maxattn.kernels.fused.kernel import Fused

HIGHEST = "highest"


@dataclass(frozen=True)
class DenseLibrary(Fused):
    """Compute rectangles densely in float32; rows without keys come out as garbage, as a library
    may leave them.
    """

    name: ClassVar[str] = "dense library"

    def piece_forward(self, q, k, v, piece, lengths):
        s = self._scores(q, k, piece, lengths)
        top = s.max(-1)
        p = jnp.exp(s - top[..., None])
        out = jnp.einsum(
            "bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), _heads(v, q), precision=HIGHEST
        )
        return out.astype(q.dtype), top + jnp.log(p.sum(-1))

    def piece_backward(self, q, k, v, out, lse, dout, piece, lengths):
        kh, vh, dout32 = _heads(k, q), _heads(v, q), dout.astype(jnp.float32)
        p = jnp.exp(self._scores(q, k, piece, lengths) - lse[..., None])
        dp = jnp.einsum("btnh,bsnh->bnts", dout32, vh, precision=HIGHEST)
        delta = (dout32 * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        ds = p * (dp - delta[..., None])
        dq = self.scale * jnp.einsum("bnts,bsnh->btnh", ds, kh, precision=HIGHEST)
        dk = self.scale * jnp.einsum(
            "bnts,btnh->bsnh", ds, q.astype(jnp.float32), precision=HIGHEST
        )
        dv = jnp.einsum("bnts,btnh->bsnh", p, dout32, precision=HIGHEST)
        return dq.astype(q.dtype), _fold(dk, k).astype(k.dtype), _fold(dv, v).astype(v.dtype)

    def _scores(self, q, k, piece, lengths):
        (t, s), row = (q.shape[1], k.shape[1]), jnp.arange(q.shape[1])[:, None]
        ok, key = jnp.ones((1, t, s), bool), jnp.arange(k.shape[1])[None]
        ok = ok if piece.left is None else ok & (key >= row - piece.left)
        ok = ok if piece.right is None else ok & (key <= row + piece.right)
        ok = ok if lengths is None else ok & (key[None] < lengths[:, None, None])
        scores = self.scale * jnp.einsum(
            "btnh,bsnh->bnts", q.astype(jnp.float32), _heads(k, q), precision=HIGHEST
        )
        return jnp.where(ok[:, None], scores, -1e4)


def _heads(x, q):
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _fold(x, like):
    b, s, n, h = x.shape
    return x.reshape(b, s, like.shape[2], n // like.shape[2], h).sum(3)
