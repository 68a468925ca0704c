"""What every fused kernel of a GPU library shares: all that lies between `Kernel` and a call of the
library.

A library computes a rectangle of pairs: everything allowed, or a band that starts at its corner,
and a number of real keys for each batch row. Here masks become such rectangles, their results are
merged, rows with nothing to attend to are made 0 and -inf, and a gradient of the LSE is added,
which libraries drop:

    dS = P * (dP - delta) + P * dlse        dq += scale * dlse * (P k)        dk += P^T (scale *
    dlse * q)

The last two are a forward and a backward with k in the place of v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxattn.call import Call, Reason
from maxattn.kernels.base import Grads, Inputs, Kernel, Offset, Result, Rows
from maxattn.kernels.fused import masks as fused_masks
from maxattn.kernels.fused.pieces import Piece, fits_shards, pieces, shifts
from maxattn.kernels.softmax import BIG_LSE, NEG_INF


class Pairs(NamedTuple):
    """Allow pairs by intervals of keys and by ids, for kernels that test pairs of a rectangle.

    Query i may attend to key j where `lo[m, i] <= j < hi[m, i]` for some m, and `q_ids[b, i] ==
    kv_ids[b, j]`. `tiles` is how a kernel goes through them where it takes lists of tiles.
    """

    lo: Int[Array, "M T"] | None
    hi: Int[Array, "M T"] | None
    q_ids: Int[Array, "B T"] | None
    kv_ids: Int[Array, "B S"] | None
    tiles: Any = None


Lengths = Array | Pairs | None  # int32 [B], real keys of each batch row; or which pairs are allowed


@dataclass(frozen=True)
class Fused(Kernel):
    """Run a library's kernel on the rectangles of a mask.

    Args:
        scale: multiplies the scores, in float32, inside the kernel.
        lse_gradient: whether the LSE is part of the result, so that it can have a gradient.
    """

    name: ClassVar[str]
    scale: float
    lse_gradient: bool = False

    def piece_forward(
        self, q: Array, k: Array, v: Array, piece: Piece, lengths: Lengths
    ) -> tuple[Array, Array]:
        """Return (out [B,T,N,H], lse [B,N,T]) of one rectangle, whose arrays are cut already."""
        raise NotImplementedError

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
        """Return (dq, dk, dv) of one rectangle from a given output and LSE."""
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        parts = fused_masks.split(mask)
        width = q.shape[3]
        q, k, v = (pad_heads(x) for x in (q, k, v))
        keys = _Keys.of(parts, q, k, kv_offset)
        k, v = keys.packed(k), keys.packed(v)

        def at(shift: int, q: Array, k: Array, v: Array, lengths: Lengths) -> tuple[Array, Array]:
            found = [self._forward(q, k, v, p, lengths) for p in self._pieces(parts, shift, q, k)]
            return _merged(found, q)

        out, lse = self._over_shifts(parts, q_offset, kv_offset, at, (q, k, v, keys.lengths))
        return Result(out[..., :width], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, None) from a given LSE and output; dk and dv are float32, rounded
        once to k's dtype.
        """
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        out, lse, dout, dlse = rows.operands
        parts = fused_masks.split(mask)
        width = q.shape[3]
        q, k, v, out, dout = (pad_heads(x) for x in (q, k, v, out, dout))
        keys = _Keys.of(parts, q, k, kv_offset)
        k, v = keys.packed(k), keys.packed(v)
        operands = (q, k, v, keys.lengths, out.astype(q.dtype), lse, dout.astype(q.dtype), dlse)

        def at(
            shift: int, q: Array, k: Array, v: Array, lengths: Lengths, *given: Array
        ) -> tuple[Array, Array, Array]:
            cut = self._pieces(parts, shift, q, k)
            return _summed([(p, self._backward(q, k, v, p, lengths, *given)) for p in cut], q, k)

        dq, dk, dv = self._over_shifts(parts, q_offset, kv_offset, at, operands)
        dk, dv = keys.unpacked(dk), keys.unpacked(dv)
        return Grads(dq[..., :width], dk[..., :width], dv[..., :width])

    # ---- which rectangles ------------------------------------------------------------------------

    def _pieces(
        self, parts: fused_masks.Parts, shift: int, q: Array, k: Array
    ) -> tuple[Piece, ...]:
        return pieces(_band(parts), shift, q.shape[1], k.shape[1])

    def _over_shifts(
        self,
        parts: fused_masks.Parts,
        q_offset: Offset,
        kv_offset: Offset,
        at: Callable[..., Any],
        operands: tuple[Any, ...],
    ) -> Any:
        """Compute at the one shift there is, or at the one of a few that the devices are at."""
        band = _band(parts)
        if band.is_full:
            return at(0, *operands)
        shift = q_offset - kv_offset + band.offset
        if not isinstance(shift, jax.Array):
            return at(int(shift), *operands)
        cases = shifts(band, operands[0].shape[1], operands[1].shape[1])
        step = cases[1] - cases[0]
        bounded = jnp.clip(shift, cases[0], cases[-1])
        branches = [lambda *x, s=s: at(s, *x) for s in cases]
        result = jax.lax.switch((bounded - cases[0]) // step, branches, *operands)
        # A shift between the cases never comes from the strategies here; if it did, its answer
        # would be no number.
        fits = (bounded - cases[0]) % step == 0
        return jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan), result)

    # ---- one rectangle ---------------------------------------------------------------------------

    def _forward(
        self, q: Array, k: Array, v: Array, p: Piece, lengths: Lengths
    ) -> tuple[Piece, Array, Array]:
        q, k, v = q[:, p.q0 : p.q1], k[:, p.k0 : p.k1], v[:, p.k0 : p.k1]
        own = _lengths_from(lengths, p)
        out, lse = self.piece_forward(q, k, v, p, own)
        seen = _seen(p, own)
        if seen is not None:
            out = jnp.where(seen[:, :, None, None], out, 0).astype(q.dtype)
            lse = jnp.where(seen[:, None], lse, NEG_INF)
        return p, out, lse

    def _backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        p: Piece,
        lengths: Lengths,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array,
    ) -> tuple[Array, Array, Array]:
        q, out, dout = (x[:, p.q0 : p.q1] for x in (q, out, dout))
        k, v = k[:, p.k0 : p.k1], v[:, p.k0 : p.k1]
        lse, dlse = lse[:, :, p.q0 : p.q1], dlse[:, :, p.q0 : p.q1]
        own = _lengths_from(lengths, p)
        # Rows that see nothing, here or anywhere, get a large LSE and no gradient: their P is exp(s
        # - 1e30) = 0. Where every row sees a key, only rows that padding added are without an LSE,
        # and their dout is 0 already.
        empty, seen = lse == NEG_INF, _seen(p, own)
        if seen is not None:
            empty |= ~seen[:, None]
            dout = jnp.where(_rows(empty), 0, dout).astype(q.dtype)
        lse = jnp.where(empty, BIG_LSE, lse)
        dq, dk, dv = (
            x.astype(jnp.float32) for x in self.piece_backward(q, k, v, out, lse, dout, p, own)
        )
        if self.lse_gradient:
            extra = self._of_lse(q, k, p, own, lse, jnp.where(empty, 0.0, dlse))
            dq, dk = dq + extra[0], dk + extra[1]
        return dq, dk, dv

    def _of_lse(
        self, q: Array, k: Array, p: Piece, lengths: Lengths, lse: Array, dlse: Array
    ) -> tuple[Array, Array]:
        """Return the shares of (dq, dk) that come from a gradient of the LSE."""
        pk, here = self.piece_forward(q, k, k, p, lengths)
        weight = jnp.where(dlse == 0.0, 0.0, self.scale * dlse * jnp.exp(here - lse))
        dq = _rows(weight) * pk.astype(jnp.float32)
        dout = (_rows(self.scale * dlse) * q.astype(jnp.float32)).astype(q.dtype)
        _, _, dk = self.piece_backward(q, k, k, pk, lse, dout, p, lengths)
        return jnp.where(_rows(dlse) == 0.0, 0.0, dq), dk.astype(jnp.float32)


def refuse_shards(who: str, parts: fused_masks.Parts, call: Call) -> Reason | None:
    """Return why a band cannot be cut for the shards that a device has."""
    if not call.sharded or fits_shards(parts, call.q_len, call.kv_len):
        return None
    rule = (
        f"on a shard it takes {parts.positions[0]} where queries and keys are split alike, and a"
        f" device has {call.q_len} queries and {call.kv_len} keys"
    )
    return Reason(
        who,
        f"mask {parts.positions[0]}",
        rule,
        f"set context_parallel: ring or ulysses, or {fused_masks.REMEDY}",
    )


@dataclass(frozen=True)
class _Keys:
    """Hold how many local keys are real, and where they are when that is not at the front."""

    lengths: Lengths
    order: Array | None

    @classmethod
    def of(cls, parts: fused_masks.Parts, q: Array, k: Array, kv_offset: Offset) -> _Keys:
        lengths = fused_masks.lengths_of(parts, q.shape[0], k.shape[1], kv_offset)
        if not parts.has_flags:
            return cls(lengths, None)
        real = fused_masks.real_keys(parts, k.shape[1], kv_offset)
        order = jnp.argsort(~real, axis=1, stable=True)
        return cls(lengths, jnp.broadcast_to(order, (q.shape[0], k.shape[1])))

    def packed(self, x: Array) -> Array:
        """Gather the real keys to the front."""
        return (
            x
            if self.order is None
            else jnp.take_along_axis(x, self.order[:, :, None, None], axis=1)
        )

    def unpacked(self, x: Array) -> Array:
        """Put gradients of keys back where the keys came from."""
        return (
            x
            if self.order is None
            else jnp.take_along_axis(x, jnp.argsort(self.order, axis=1)[..., None, None], 1)
        )


def _band(parts: fused_masks.Parts) -> fused_masks.Band:
    band = parts.band
    assert band is not None and not parts.rest, parts  # supports() refused it
    return band


def _lengths_from(lengths: Lengths, p: Piece) -> Lengths:
    if lengths is None or isinstance(lengths, Pairs):
        return lengths
    return jnp.clip(lengths - p.k0, 0, p.k1 - p.k0)


def _seen(p: Piece, lengths: Lengths) -> Array | None:
    """Tell which queries [B or 1, T] of a rectangle see a real key; None where all are known to."""
    if isinstance(lengths, Pairs) or (lengths is None and p.sees_all()):
        return None  # with `Pairs` the kernel says so itself
    row = jnp.arange(p.q1 - p.q0)[None]
    first = 0 if p.left is None else jnp.maximum(0, row - p.left)
    end: Any = p.k1 - p.k0 if lengths is None else lengths[:, None]
    end = end if p.right is None else jnp.minimum(end, row + p.right + 1)
    return jnp.broadcast_to(first < end, (1 if lengths is None else lengths.shape[0], row.shape[1]))


def _merged(found: list[tuple[Piece, Array, Array]], q: Array) -> tuple[Array, Array]:
    """Merge the results of rectangles by log-sum-exp, in float32; no rectangle sees nothing."""
    t = q.shape[1]
    if len(found) == 1 and found[0][0].q0 == 0:
        return found[0][1], found[0][2]
    total = jnp.full((q.shape[0], q.shape[2], t), NEG_INF, jnp.float32)
    out = jnp.zeros(q.shape, jnp.float32)
    for p, out_p, lse_p in found:
        before = ((0, 0), (p.q0, t - p.q1))
        out_p = jnp.pad(out_p.astype(jnp.float32), (*before, (0, 0), (0, 0)))
        lse_p = jnp.pad(lse_p, ((0, 0), *before), constant_values=NEG_INF)
        top = jnp.maximum(total, lse_p)
        safe = jnp.where(top == NEG_INF, 0.0, top)
        a, b = jnp.exp(total - safe), jnp.exp(lse_p - safe)
        weight = jnp.where(top == NEG_INF, 1.0, a + b)
        out = _rows(a / weight) * out + _rows(b / weight) * out_p
        total = jnp.where(top == NEG_INF, NEG_INF, safe + jnp.log(weight))
    return out.astype(q.dtype), total


def _summed(
    found: list[tuple[Piece, tuple[Array, Array, Array]]], q: Array, k: Array
) -> tuple[Array, Array, Array]:
    """Add the gradients of rectangles where they belong: dq in q's dtype, dk and dv in float32."""
    if len(found) == 1 and found[0][0][:4] == (0, q.shape[1], 0, k.shape[1]):
        dq, dk, dv = found[0][1]
        return dq.astype(q.dtype), dk, dv
    dq = jnp.zeros(q.shape, jnp.float32)
    dk = dv = jnp.zeros(k.shape, jnp.float32)
    for p, (dq_p, dk_p, dv_p) in found:
        dq = dq.at[:, p.q0 : p.q1].add(dq_p)
        dk, dv = dk.at[:, p.k0 : p.k1].add(dk_p), dv.at[:, p.k0 : p.k1].add(dv_p)
    return dq.astype(q.dtype), dk, dv


def _rows(x: Array) -> Array:
    """Turn [B, N, T] into [B, T, N, 1]."""
    return x.swapaxes(1, 2)[..., None]


def pad_heads(x: Array) -> Array:
    """Pad the head dim to a multiple of 8 with zeros, which change no score and add columns that
    are dropped.
    """
    extra = -x.shape[3] % 8
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else x
