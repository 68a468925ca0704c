"""A dense kernel with the interface of GPU libraries, to test on a CPU the code around them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Grads, Lines, Result, Rows
from maxattn.kernels.fused.kernel import Fused
from maxattn.kernels.fused.rectangles import Intervals, PieceInputs
from maxattn.kernels.softmax import fold_like


@dataclass(frozen=True)
class DenseLibrary(Fused):
    """Compute rectangles densely in float32; rows without keys return garbage, as libraries may.

    So does the gradient of a bias at pairs that a band hides.
    """

    name: ClassVar[str] = "dense_library"
    bias_gradient: bool = True

    @staticmethod
    def build(call: Call, config: Any, target: Any) -> DenseLibrary:
        return DenseLibrary(call.scale, call.return_lse)

    def without_dbias(self) -> DenseLibrary:
        return replace(self, bias_gradient=False)

    def lines(self, call: Call) -> Lines:
        return Lines("dense", "none")

    def piece_forward(self, inputs: PieceInputs) -> Result:
        q, scores = inputs.q, self._scores(inputs)
        top = scores.max(-1)
        p = jnp.exp(scores - top[..., None])
        shares = p / p.sum(-1, keepdims=True)
        out = _einsum("bnts,bsnh->btnh", shares, _heads(inputs.v, q))
        return Result(out.astype(q.dtype), top + jnp.log(p.sum(-1)))

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        q, k, v = inputs.q, inputs.k, inputs.v
        dout = rows.dout.astype(jnp.float32)
        p = jnp.exp(self._scores(inputs) - rows.lse[..., None])
        dp = _einsum("btnh,bsnh->bnts", dout, _heads(v, q))
        delta = (dout * rows.out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        ds = p * (dp - delta[..., None])
        dq = self.scale * _einsum("bnts,bsnh->btnh", ds, _heads(k, q))
        dk = self.scale * _einsum("bnts,btnh->bsnh", ds, q.astype(jnp.float32))
        dv = _einsum("bnts,btnh->bsnh", p, dout)
        dk, dv = _fold(dk, k).astype(k.dtype), _fold(dv, v).astype(v.dtype)
        return Grads(dq.astype(q.dtype), dk, dv, self._dbias(inputs, ds))

    def _dbias(self, inputs: PieceInputs, ds: Array) -> Array | None:
        bias, band = inputs.bias, inputs.piece
        if bias is None or not self.bias_gradient:
            return None
        summed = fold_like(ds, bias.shape)
        row, key = jnp.arange(bias.shape[2])[:, None], jnp.arange(bias.shape[3])[None]
        hidden = False if band.right is None else key > row + band.right
        return jnp.where(hidden, jnp.nan, summed).astype(bias.dtype)

    def _scores(self, inputs: PieceInputs) -> Array:
        q, k, piece, lengths = inputs.q, inputs.k, inputs.piece, inputs.lengths
        assert not isinstance(lengths, Intervals)
        row, key = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
        ok = jnp.ones((1, q.shape[1], k.shape[1]), bool)
        ok = ok if piece.left is None else ok & (key >= row - piece.left)
        ok = ok if piece.right is None else ok & (key <= row + piece.right)
        ok = ok if lengths is None else ok & (key[None] < lengths[:, None, None])
        scores = _einsum("btnh,bsnh->bnts", q.astype(jnp.float32), _heads(k, q))
        if inputs.bias is None:
            return jnp.where(ok[:, None], self.scale * scores, -1e4)
        return jnp.where(ok[:, None], self.scale * scores + inputs.bias, -1e38)


def _einsum(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, precision="highest")


def _heads(x, q):
    return jnp.repeat(x.astype(jnp.float32), q.shape[2] // x.shape[2], axis=2)


def _fold(x, like):
    b, s, n, h = x.shape
    return x.reshape(b, s, like.shape[2], n // like.shape[2], h).sum(3)
