"""FlashAttention-4's backward over all pairs, split over the queries where it leaves SMs idle.

A thread block takes a tile of keys of one head, against all queries. Thread blocks run in waves of
as many as there are SMs, and the last wave is as long as any: 256 tiles of 12 heads are 23.3 waves
of 132, which last 24, and the 4 tiles of a text are 48 thread blocks, which leave 84 SMs idle. So
the tiles that fill waves are launched as ever, and those that are left are split over the queries,
and the dK and dV of the splits are summed: 253 tiles are 23.0 waves, and the other three, in 11
splits, 0.3 of one; a text's four are 4.0 waves of splits that take an eleventh each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.devices import SMS
from maxattn.kernels.base import Grads, Rows
from maxattn.kernels.fa4 import backward_steps, primitives
from maxattn.kernels.fa4.backward_steps import summed_splits
from maxattn.kernels.fa4.kernel_calls import BackwardOperands
from maxattn.kernels.fa4.launch import takes_splits
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.tile_sizes import Dims, whole_tile
from maxattn.kernels.fused.rectangles import PieceInputs

LEAST_GAIN = 0.01
MANY_SPLITS, MOST_SPLITS = 16, 128  # where thread blocks fill the SMs, and where they are fewer
# What sums over splits, and a second launch, cost beside their work: in tiles of keys by queries,
# of some 3 us.
SUMS, LAUNCH = 3, 2
Operands = tuple[Array, ...]
"""q, k, v, out, lse, dout."""


class SplitTail(NamedTuple):
    """Name the tiles of keys whose backward is split over the queries.

    Attributes:
        tiles: how many, the last ones.
        splits: of the queries, for each.
    """

    tiles: int
    splits: int

    @property
    def line(self) -> str:
        """Describe it for `explain`."""
        return splits_text(self.tiles, "keys", self.splits, "queries")


def splits_text(tiles: int, of: str, splits: int, over: str) -> str:
    """Describe the last tiles that go in splits, for `explain`."""
    which = f"the last {tiles} tiles" if tiles > 1 else "the last tile"
    return f"{which} of {of} in {splits} splits of the {over}, so that fewer SMs wait"


class BackwardWork(NamedTuple):
    """Say how much a backward over all pairs has to do.

    Attributes:
        tiles: of keys.
        rows: thread blocks for each of them: heads of all batch rows.
        steps: tiles of queries, which a thread block goes through.
        sms: streaming multiprocessors (SMs), each of which runs one thread block at a time.
    """

    tiles: int
    rows: int
    steps: int
    sms: int = SMS

    def lasts(self, tiles: int, splits: int = 1) -> float:
        """Return how long so many tiles take, in steps."""
        waves = -(-tiles * self.rows * splits // self.sms)
        return waves * (-(-self.steps // splits) + START)

    def cost(self, tail: SplitTail) -> float:
        """Return how long all tiles take where these are split."""
        first = self.lasts(self.tiles - tail.tiles)
        return first + self.lasts(*tail) + SUMS + (LAUNCH if first else 0)

    def tails(self) -> Iterator[SplitTail]:
        """List what can be split: the tiles of some two waves, where all splits have queries."""
        for n in range(1, min(self.tiles, 2 * -(-self.sms // self.rows)) + 1):
            yield from (SplitTail(n, each) for each in range(2, self._most_splits(n) + 1))

    def _most_splits(self, tiles: int) -> int:
        return min(self.steps, most_splits(tiles * self.rows, self.sms, MOST_SPLITS))


def most_splits(blocks: int, sms: int, most: int) -> int:
    """Return into how many splits thread blocks may go: `most` where they are few."""
    return max(MANY_SPLITS, min(most, -(-2 * sms // blocks)))


def tail_of(work: BackwardWork) -> SplitTail | None:
    """Choose what is split: what ends first; None where that gains less than 1%."""
    best = min(work.tails(), key=lambda tail: (work.cost(tail), tail), default=None)
    most = (1 - LEAST_GAIN) * work.lasts(work.tiles)
    return best if best and work.cost(best) <= most else None


@lru_cache(maxsize=4096)
def tail_for(queries: Dims, keys: Dims, sms: int = SMS) -> SplitTail | None:
    """Choose for the shapes [B,T,N,H] of q and [B,S,K,H] of k; None too where they do not fit."""
    if not backward_steps.of_shape(queries, keys, backward_steps.HOPPER_LIMIT):
        return None
    (batch, t, heads, _), tile = queries, whole_tile(queries[3])
    steps = -(-t // tile.queries)
    return tail_of(BackwardWork(-(-keys[1] // tile.keys), batch * heads, steps, sms))


def backward(inputs: PieceInputs, rows: Rows, scale: float, sms: int = SMS) -> Grads:
    """Return (dq, dk, dv) over all pairs from a given output and LSE.

    Args:
        inputs: bfloat16 or float16; all its pairs are allowed.
        rows: of the queries.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    operands = inputs.q, inputs.k, inputs.v, rows.out, rows.lse, rows.dout
    tail = tail_for(inputs.q.shape, inputs.k.shape, sms)
    if tail is None or not _can_split(inputs.q):
        return _whole(operands, scale)

    @jax.custom_batching.custom_vmap
    def run(*operands: Array) -> Grads:
        return _in_splits(operands, scale, tail)

    @run.def_vmap
    def _many(size: int, mapped: list[bool], *operands: Array) -> tuple[Grads, Any]:
        axes = [0 if m else None for m in mapped]
        found = jax.vmap(lambda *x: _whole(x, scale), axes, axis_size=size)(*operands)
        return found, jax.tree.map(lambda _: True, found)

    return run(*operands)


def _can_split(q: Array) -> bool:
    return backward_steps.library_has_launches() and takes_splits(str(q.dtype), q.shape[3])


def _whole(operands: Operands, scale: float) -> Grads:
    q, k, v, out, lse, dout = operands
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    inputs = PieceInputs.whole(q, k, v, None)
    return primitives.fa4_backward(inputs, rows, primitives.NO_WINDOW, scale, launched=True)


def _in_splits(operands: Operands, scale: float, tail: SplitTail) -> Grads:
    lse, batch = operands[4], operands[0].shape[0]
    q, k, v, out, dout = (own_array(x) for x in (*operands[:4], operands[5]))
    launches: Any = backward_steps.Launches(scale, q, k)
    delta, lse, zeros = launches.first(out, dout, lse)
    size = whole_tile(q.shape[3]).keys
    start = (-(-k.shape[1] // size) - tail.tiles) * size
    given = BackwardOperands(q, k, v, dout, lse, delta, zeros)
    # XLA (jax 0.11.2) would write one result of a call into another of it, and fail over the cycle.
    dq, *found = jax.lax.optimization_barrier(launches.split(given, start, tail.splits))
    *whole, dk, dv = found
    dk, dv = joined(whole, [summed_splits(x, batch) for x in (dk, dv)], start)
    return Grads(launches.last(dq, q), dk, dv)


def joined(whole: list[Array], last: list[Array], start: int) -> list[Array]:
    """Put the gradients of the last keys behind those of the keys before `start`."""
    if not start:
        return last
    put = jax.lax.dynamic_update_slice_in_dim
    joined = [put(x, part, start, 1) for x, part in zip(whole, last, strict=True)]
    # Else a sum that reads dV, of a bias's gradient, reads what stood there before too: XLA copies
    # it for that.
    return jax.lax.optimization_barrier(joined)
