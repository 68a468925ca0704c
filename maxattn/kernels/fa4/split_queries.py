"""FlashAttention-4's backward over all pairs, in parts of the queries where whole rows leave
processors idle.

A row of work is a tile of keys of one head, against all queries. A processor of a GPU takes one at
a time, so rows run in rounds of as many as there are processors, and the last round is as long as
any: 256 tiles of 12 heads are 23.3 rounds of 132, which last 24, and the 4 tiles of a text are 48
rows, which leave 84 processors idle. So the rows that fill rounds are launched as ever, and those
that are left in several parts of the queries, whose dK and dV are summed: 253 tiles are 23.0
rounds, and the other three, in 11 parts, 0.3 of one; a text's four are 4.0 rounds of 11th parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.kernels.fa4 import backward_steps, primitives
from maxattn.kernels.fa4.launch import takes_parts
from maxattn.kernels.fa4.launch_order import PROCESSORS, START
from maxattn.kernels.fa4.tile_sizes import whole_tile

LEAST_GAIN = 0.01
MOST_PARTS = 16
# What sums of parts, and a second launch, cost beside their work: in tiles of keys by queries, of
# some 3 us.
SUMS, LAUNCH = 3, 2
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

    @property
    def line(self) -> str:
        """Describe it for `explain`."""
        which = f"the last {self.tiles} tiles" if self.tiles > 1 else "the last tile"
        return (
            f"{which} of keys in {self.parts} parts of the queries, so that fewer processors wait"
        )


def tail_of(tiles: int, rows: int, steps: int, processors: int = PROCESSORS) -> Tail | None:
    """Choose what is launched in parts: what ends first; None where that gains less than 1%.

    Args:
        tiles: of keys.
        rows: for each of them: heads of all batch rows.
        steps: tiles of queries, which a row goes through.
        processors: that take a row each.
    """

    def lasts(tiles: int, parts: int = 1) -> float:
        return -(-tiles * rows * parts // processors) * (-(-steps // parts) + START)

    def cost(tail: Tail) -> float:
        first = lasts(tiles - tail.tiles)
        return first + lasts(*tail) + SUMS + (LAUNCH if first else 0)

    best = min(
        _tails(tiles, rows, steps, processors), key=lambda tail: (cost(tail), tail), default=None
    )
    return best if best and cost(best) <= (1 - LEAST_GAIN) * lasts(tiles) else None


def _tails(tiles: int, rows: int, steps: int, processors: int) -> Iterator[Tail]:
    """List what can be launched in parts: the rows of some two rounds, in parts that all have
    queries.
    """
    for n in range(1, min(tiles, 2 * -(-processors // rows)) + 1):
        yield from (Tail(n, parts) for parts in range(2, min(MOST_PARTS, steps) + 1))


def tail_for(queries: Dims, keys: Dims, processors: int = PROCESSORS) -> Tail | None:
    """Choose for arrays, by the shapes [B,T,N,H] of q and [B,S,K,H] of k; None too where they do
    not fit.
    """
    if not backward_steps.of_shape(queries, keys):
        return None
    tile = whole_tile(queries[3])
    return tail_of(
        -(-keys[1] // tile.keys),
        queries[0] * queries[2],
        -(-queries[1] // tile.queries),
        processors,
    )


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    scale: float,
    processors: int = PROCESSORS,
) -> Grads:
    """Return (dq, dk, dv) over all pairs from a given output and LSE.

    Args:
        q, k, v: [B,T,N,H], [B,S,K,H]; bfloat16 or float16.
        out, lse, dout: [B,T,N,H], [B,N,T], [B,T,N,H].
        scale: multiplies the scores.
        processors: of the GPU.
    """
    tail = tail_for(q.shape, k.shape, processors)
    if tail is None or not backward_steps.made_apart() or not takes_parts(str(q.dtype), q.shape[3]):
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
    return primitives.fa4_backward(q, k, v, out, lse, dout, (None, None), None, scale)


def _in_parts(operands: tuple[Array, ...], scale: float, tail: Tail) -> Grads:
    lse = operands[4]
    q, k, v, out, dout = (primitives.widened(x) for x in (*operands[:4], operands[5]))
    launches: Any = backward_steps.Launches(scale, q, k)
    delta, lse, zeros = launches.first(out, dout, lse)
    size = whole_tile(q.shape[3]).keys
    start = (-(-k.shape[1] // size) - tail.tiles) * size
    # XLA (jax 0.11.2) would write one result of a call into another of it, and fail over the cycle.
    sums, *found = jax.lax.optimization_barrier(
        launches.rounds(q, k, v, dout, lse, delta, zeros, start, tail.parts)
    )
    parts = [_summed(x, q.shape[0]) for x in found[-2:]]
    if start:
        parts = [
            jax.lax.dynamic_update_slice_in_dim(x, part, start, 1)
            for x, part in zip(found, parts, strict=False)
        ]
        # Else a sum that reads dV, of a bias's gradient, reads what stood there before too: XLA
        # copies it for that.
        parts = jax.lax.optimization_barrier(parts)
    return launches.last(sums, q), parts[0], parts[1]


def _summed(parts: Array, batch: int) -> Array:
    """Sum over parts, which stand before the batch."""
    each = parts.reshape(-1, batch, *parts.shape[1:])
    return each.astype(jnp.float32).sum(0).astype(parts.dtype)
