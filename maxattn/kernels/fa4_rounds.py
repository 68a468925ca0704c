"""FlashAttention-4's backward over all pairs, in parts of the queries where whole rows leave processors idle.

A row of work is a tile of keys of one head, against all queries. A processor of a GPU takes one at a time, so rows run
in rounds of as many as there are processors, and the last round is as long as any: 256 tiles of 12 heads are 23.3
rounds of 132, which last 24, and the 4 tiles of a text are 48 rows, which leave 84 processors idle. So the rows that
fill rounds are launched as ever, and those that are left in several parts of the queries, whose dK and dV are summed:
253 tiles are 23.0 rounds, and the other three, in 11 parts, 0.3 of one; a text's four are 4.0 rounds of 11th parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels import fa4_backward, fa4_calls
from maxattn.kernels.fa4_launch import forward_parts_launches, library, run_forward_rounds, takes_parts
from maxattn.kernels.fa4_sizes import forward_tile, whole_tile
from maxattn.kernels.tile_order import PROCESSORS, START

LEAST_GAIN, LEAST_AHEAD = 0.01, 0.02  # of a backward, and of a forward, whose parts take more to merge
MOST_PARTS = 16
# What sums of parts, merges of parts, and a second launch cost: in tiles of keys by queries, of some 3 and 2 us.
SUMS, MERGES, LAUNCH = 3, 6, 2
Grads = tuple[Array, Array, Array]
Dims = tuple[int, ...]


class Tail(NamedTuple):
    """Name the tiles that are launched in parts.

    Attributes:
        tiles: how many, the last ones.
        parts: of the queries, for each.
    """

    tiles: int
    parts: int

    def line(self, what: str, others: str) -> str:
        """Describe it for `explain`, where tiles of one sequence are launched in parts of the other."""
        which = f"the last {self.tiles} tiles of {what}" if self.tiles > 1 else f"the last tile of {what}"
        return f"{which} in {self.parts} parts of the {others}, so that no processor waits"


def tail_of(
    tiles: int, rows: int, steps: int, processors: int = PROCESSORS, after: int = SUMS, least: float = LEAST_GAIN
) -> Tail | None:
    """Choose what is launched in parts: what ends first; None where that gains too little.

    Args:
        tiles: of keys.
        rows: for each of them: heads of all batch rows.
        steps: tiles of queries, which a row goes through.
        processors: that take a row each.
        after: what putting parts together costs.
        least: the share of time that must be gained.
    """

    def lasts(tiles: int, parts: int = 1) -> float:
        return -(-tiles * rows * parts // processors) * (-(-steps // parts) + START)

    def cost(tail: Tail) -> float:
        first = lasts(tiles - tail.tiles)
        return first + lasts(*tail) + after + (LAUNCH if first else 0)

    best = min(_tails(tiles, rows, steps, processors), key=lambda tail: (cost(tail), tail), default=None)
    return best if best and cost(best) <= (1 - least) * lasts(tiles) else None


def _tails(tiles: int, rows: int, steps: int, processors: int) -> Iterator[Tail]:
    """List what can be launched in parts: the rows of some two rounds, in parts that all have queries."""
    for n in range(1, min(tiles, 2 * -(-processors // rows)) + 1):
        yield from (Tail(n, parts) for parts in range(2, min(MOST_PARTS, steps) + 1))


def tail_for(queries: Dims, keys: Dims, processors: int = PROCESSORS) -> Tail | None:
    """Choose for arrays, by the shapes [B,T,N,H] of q and [B,S,K,H] of k; None too where they do not fit."""
    if not fa4_backward.of_shape(queries, keys):
        return None
    tile = whole_tile(queries[3])
    return tail_of(-(-keys[1] // tile.keys), queries[0] * queries[2], -(-queries[1] // tile.queries), processors)


def queries_for(queries: Dims, keys: Dims, processors: int = PROCESSORS) -> Tail | None:
    """Choose the tiles of queries that a forward goes through in parts of the keys; else as `tail_for`."""
    if not fa4_backward.of_shape(queries, keys):
        return None
    tile = forward_tile(queries[3])
    tiles, steps = -(-queries[1] // tile.queries), -(-keys[1] // tile.keys)
    tail = tail_of(tiles, queries[0] * queries[2], steps, processors, after=MERGES, least=LEAST_AHEAD)
    return tail if tail and tail.tiles < tiles else None


def forward(q: Array, k: Array, v: Array, scale: float, processors: int = PROCESSORS) -> tuple[Array, Array]:
    """Return (out [B,T,N,H], lse [B,N,T]) over all pairs.

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16.
        scale: multiplies the scores.
        processors: of the GPU.
    """
    tail = queries_for(q.shape, k.shape, processors)
    if tail is None or not takes_parts(str(q.dtype), q.shape[3]):
        return fa4_calls.fa4_forward(q, k, v, (None, None), None, scale)

    @jax.custom_batching.custom_vmap
    def run(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        return _forward_in_parts(q, k, v, scale, tail)

    @run.def_vmap
    def _many(size: int, mapped: list[bool], *operands: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        each = lambda q, k, v: fa4_calls.fa4_forward(q, k, v, (None, None), None, scale)  # noqa: E731
        return jax.vmap(each, [0 if m else None for m in mapped], axis_size=size)(*operands), (True, True)

    return run(q, k, v)


def _forward_in_parts(q: Array, k: Array, v: Array, scale: float, tail: Tail) -> tuple[Array, Array]:
    lib, size = library(), forward_tile(q.shape[3]).queries
    (batch, t, n, _), start = q.shape, (-(-q.shape[1] // size) - tail.tiles) * size
    launches = forward_parts_launches(str(q.dtype), q.shape[3], float(scale), batch, tail.parts)
    rows = (batch, t, n), (tail.parts * batch, t - start, n)
    results = [jax.ShapeDtypeStruct((b, m, n, q.shape[3]), q.dtype) for b, m, n in rows]
    lses = [jax.ShapeDtypeStruct((b, n, m), jnp.float32) for b, m, n in rows]
    found = import_module("cutejax").call(
        run_forward_rounds, [results[0], lses[0], results[1], lses[1]], *launches, q, k, v,
        in_specs=[lib._QKV_SPEC] * 3, out_specs=[lib._QKV_SPEC, lib._LSE_SPEC] * 2, name="maxattn_forward_rounds",
    )  # fmt: skip
    out, lse, parts, lse_parts = jax.lax.optimization_barrier(found)
    end, lse_end = _merged(*(x.reshape(-1, batch, *x.shape[1:]) for x in (parts, lse_parts)))
    put = jax.lax.dynamic_update_slice_in_dim
    return put(out, end.astype(out.dtype), start, 1), put(lse, lse_end, start, 2)


def _merged(parts: Array, lse: Array) -> tuple[Array, Array]:
    """Merge [P,B,T,N,H] over parts of the keys by their LSE [P,B,N,T]."""
    whole = jax.nn.logsumexp(lse, 0)
    weights = jnp.exp(lse - whole).swapaxes(2, 3)[..., None]
    return (weights * parts.astype(jnp.float32)).sum(0), whole


def backward(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, scale: float, processors: int = PROCESSORS
) -> Grads:
    """Return (dq, dk, dv) over all pairs from a given output and LSE.

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16.
        out, lse, dout: [B,T,N,H], [B,N,T], [B,T,N,H].
        scale: multiplies the scores.
        processors: of the GPU.
    """
    tail = tail_for(q.shape, k.shape, processors)
    if tail is None or not fa4_backward.made_apart() or not takes_parts(str(q.dtype), q.shape[3]):
        return _whole((q, k, v, out, lse, dout), scale)

    @jax.custom_batching.custom_vmap
    def run(*operands: Array) -> Grads:
        return _in_parts(operands, scale, tail)

    @run.def_vmap
    def _many(size: int, mapped: list[bool], *operands: Array) -> tuple[Grads, tuple[bool, ...]]:
        axes = [0 if m else None for m in mapped]
        return jax.vmap(lambda *x: _whole(x, scale), axes, axis_size=size)(*operands), (True,) * 3

    return run(q, k, v, out, lse, dout)


def _whole(operands: tuple[Array, ...], scale: float) -> Grads:
    q, k, v, out, lse, dout = operands
    return fa4_calls.fa4_backward(q, k, v, out, lse, dout, (None, None), None, scale)


def _in_parts(operands: tuple[Array, ...], scale: float, tail: Tail) -> Grads:
    lse = operands[4]
    q, k, v, out, dout = (fa4_calls.widened(x) for x in (*operands[:4], operands[5]))
    launches: Any = fa4_backward.Launches(scale, q, k)
    delta, lse, zeros = launches.first(out, dout, lse)
    size = whole_tile(q.shape[3]).keys
    start = (-(-k.shape[1] // size) - tail.tiles) * size
    # XLA (jax 0.11.2) would write one result of a call into another of it, and fail over the cycle.
    sums, *found = jax.lax.optimization_barrier(launches.rounds(q, k, v, dout, lse, delta, zeros, start, tail.parts))
    parts = [_summed(x, q.shape[0]) for x in found[-2:]]
    if start:
        parts = [jax.lax.dynamic_update_slice_in_dim(x, part, start, 1) for x, part in zip(found, parts, strict=False)]
    return launches.last(sums, q), parts[0], parts[1]


def _summed(parts: Array, batch: int) -> Array:
    """Sum over parts, which stand before the batch."""
    each = parts.reshape(-1, batch, *parts.shape[1:])
    return each.astype(jnp.float32).sum(0).astype(parts.dtype)
