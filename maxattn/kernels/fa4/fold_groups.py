"""Backwards of few queries whose heads share keys: the heads of a key head as rows of one head.

FlashAttention-4 adds the dK and dV of query heads that share a key head up in float32 arrays, which
begin as zeros and are read again. Where queries are few that takes longer than the products. As
rows of one head they are added up in registers: row t * G + g of key head k is query t of query
head k * G + g. For that XLA copies q, out, dout and dq, so it pays only where these are short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxtyping import Array, Float

from maxattn.call import Call
from maxattn.kernels.base import Grads, Rows
from maxattn.kernels.fa4.tile_sizes import Dims
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks import Causal, Full
from maxattn.masks.band_pieces import Piece, pieces
from maxattn.masks.terms import sort_terms

SHORT = 384  # queries, up to which copies are less than the launches they save
COPIES = 4  # q, out, dout and dq


def pays(queries: Dims, keys: Dims) -> bool:
    """Tell whether a backward over all pairs, or all of real keys, is folded.

    Args:
        queries, keys: shapes [B,T,N,...] of q and [B,S,K,...] of k.
    """
    (_, t, heads, *_), (_, s, kv_heads, *_) = queries, keys
    return heads > kv_heads and (2 * t <= s or t <= min(s, SHORT))


def pays_for(inputs: PieceInputs) -> bool:
    """Tell whether the backward of a rectangle is folded."""
    of_keys = inputs.is_whole or inputs.has_lengths_alone
    return of_keys and pays(inputs.q.shape, inputs.k.shape)


def call_of(call: Call) -> Call:
    """Return the call whose backward is launched: itself, or with its heads folded.

    Args:
        call: of one device, on a GPU where maxattn launches the kernels itself.
    """
    terms, batch = sort_terms(call.mask), call.batch
    of_keys = not terms.positions and not terms.rest and call.bias is None
    shapes = (batch, call.q_len, call.heads), (batch, call.kv_len, call.kv_heads)
    if not of_keys or not pays(*shapes):
        return call
    group = call.heads // call.kv_heads
    return replace(call, heads=call.kv_heads, q_len=call.q_len * group)


def seen_by_all(call: Call) -> Call | None:
    """Return the call over the keys of a band that all queries see; None for no such keys.

    A backward that does not go by lists launches it by itself, before the rest of the band.

    Args:
        call: of one device.
    """
    p = next(iter(pieces_of(call)), None)
    if p is None or not p.is_full:
        return None
    return replace(call, kv_len=p.k1, mask=Full().bind(call.q_len, p.k1))


def hides_nothing(call: Call) -> bool:
    """Tell whether all queries see all keys of a band, as of a wide window."""
    whole = seen_by_all(call)
    return whole is not None and whole.kv_len == call.kv_len


def folded_parts(call: Call) -> tuple[Call, ...]:
    """Return the calls whose backwards are launched for a band, where heads of one are folded.

    A call whose heads are not folded so is itself alone.

    Args:
        call: of one device, whose backward does not go by lists.
    """
    whole = seen_by_all(call)
    if whole is None or call_of(whole) is whole:
        return (call,)
    lengths = [p.k1 - p.k0 for p in pieces_of(call)[1:]]
    rest = (replace(call, kv_len=n, mask=Causal(0).bind(call.q_len, n)) for n in lengths)
    return whole, *rest


def pieces_of(call: Call) -> tuple[Piece, ...]:
    """Cut a band that is known when tracing into rectangles; none of any other mask."""
    band = sort_terms(call.mask).band
    if call.sharded or call.mask.has_data or call.bias is not None or band is None:
        return ()
    return () if call.mask.is_full else pieces(band, band.offset, call.q_len, call.kv_len)


def line(call: Call) -> str:
    """Say for `explain` how heads are folded; "" where they are not."""
    if call_of(call) is call:
        return ""
    return f"; the {call.heads // call.kv_heads} query heads of a key head as rows of one"


def with_groups_folded(
    compute: Callable[[PieceInputs, Rows], Grads], inputs: PieceInputs, rows: Rows
) -> Grads:
    """Return `compute(inputs, rows)` of query heads that are folded into rows.

    Args:
        compute: a backward over all pairs, or all of real keys.
        inputs: several query heads of each key head.
        rows: of the queries.
    """
    (_, t, heads, _), kv_heads = inputs.q.shape, inputs.k.shape[2]
    group = heads // kv_heads
    whole = PieceInputs.whole(_folded(inputs.q, group), inputs.k, inputs.v, inputs.lengths)
    out, dout = _folded(rows.out, group), _folded(rows.dout, group)
    lse, dlse = (_folded_rows(x, group) for x in (rows.lse, rows.dlse))
    dq, dk, dv, _ = compute(whole, Rows(out, lse, dout, dlse))
    b, _, _, h = dq.shape
    dq = dq.reshape(b, t, group, kv_heads, h).swapaxes(2, 3)
    return Grads(dq.reshape(b, t, heads, h), dk, dv)


def _folded(x: Float[Array, "B T N H"], group: int) -> Float[Array, "B T_G K H"]:
    b, t, n, h = x.shape
    return x.reshape(b, t, n // group, group, h).swapaxes(2, 3).reshape(b, t * group, -1, h)


def _folded_rows(x: Float[Array, "B N T"], group: int) -> Float[Array, "B K T_G"]:
    b, n, t = x.shape
    return x.reshape(b, n // group, group, t).swapaxes(2, 3).reshape(b, n // group, t * group)
