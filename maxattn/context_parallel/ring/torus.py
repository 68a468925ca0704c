"""The schedule of a ring among TPUs and CPUs, whose devices have links to neighbours alone.

The next block of K and V travels while the current one is computed. dK and dV travel with their K
and V back to the owner; half of the local block overlaps the last transfer (head_halves.py).
Partial results are merged by LSE in float32, hop by hop. If blocks travel in both directions
(choices.py), each direction is a lane with half of the heads, and hops of both begin together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxattn.call import Call
from maxattn.context_parallel.base import FLOAT, Collective, itemsize, kv_bytes
from maxattn.context_parallel.ring import head_halves
from maxattn.context_parallel.ring.head_halves import ALL, FIRST, SECOND, Heads, may_halve
from maxattn.context_parallel.ring.hops import (
    Keys,
    Piece,
    RingPass,
    hop_collectives,
    tie_transfer_to_kernel,
    unseen,
)
from maxattn.context_parallel.timeline import Share, Traffic
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.softmax import gradient_dtype, merge_by_lse

# If a device's queries have this many bytes, halves of q, out and dout are sliced when they are
# read: slices from before the first hop left the TPU's compiler no memory to overlap transfers with
# kernels. Smaller arrays are sliced before the first hop, since transfers then overlap better.
LARGE = 2**28


@dataclass(frozen=True)
class TorusSchedule:
    """Send gradients of K and V along with K and V, from neighbour to neighbour."""

    both_ways: bool = False  # whether halves of the heads go round in opposite directions

    @property
    def directions(self) -> int:
        """Number of directions in which blocks travel at once."""
        return 2 if self.both_ways else 1

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        return ""

    def notes(self) -> tuple[str, ...]:
        return ()

    def collectives(self, hop: Call, sends: int, chunks_per_rank: int) -> tuple[Collective, ...]:
        """List the hops after the first; float32 gradients need one more, to the keys' owner."""
        block, grads = kv_bytes(hop, itemsize(hop.dtype)), kv_bytes(hop, FLOAT)
        arrays = 2 * chunks_per_rank * self.directions
        return hop_collectives(sends, block, (sends + 1, grads), arrays)

    def traffic(self, hops: int, share: Share, hop: Call) -> Traffic:
        """Return the traffic and memory of `hops` hops; all gradients are float32.

        Memory has two or three blocks of K and V, and float32 sums, including dQ. Merges read and
        write float32 sums of out, dq, dk and dv, and read the part that each hop adds.
        """
        q, kv, item, _ = share
        halved = may_halve(hop.heads, hop.kv_heads, hop.mask, hop.bias is not None)
        held = (2 + halved + 2 * FLOAT / item) * kv + 2 * FLOAT / item * q
        merged = (2 * FLOAT + item) / item * (2 * q + kv) * hops
        return Traffic(FLOAT, False, halved, held, merged)

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> Result:
        lanes = [_Lane(*lane, kernel) for lane in self._by_direction(ring_pass, inputs)]
        totals = [[unseen(x, inputs.v.shape[3]) for x in lane.queries] for lane in lanes]
        for step in range(len(ring_pass.hops)):
            # Start all transfers before waiting for any kernel.
            coming, parts = tie_transfer_to_kernel(
                [lane.ring_pass.send_on(lane.hop(step), lane.here) for lane in lanes],
                [lane.results(step) for lane in lanes],
            )
            for total, part in zip(totals, parts, strict=True):
                for (i, _), found in part.items():
                    total[i] = Result(*merge_by_lse((total[i], found)))
            coming, totals = tie_transfer_to_kernel(coming, totals)
            for lane, here in zip(lanes, coming, strict=True):
                lane.here = here
        both = zip(lanes, totals, strict=True)
        outs, lses = zip(*(lane.ring_pass.result(x, inputs.q) for lane, x in both), strict=True)
        return Result(head_halves.joined(outs, 2), head_halves.joined(lses, 1))

    def backward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        lanes = self._backward_lanes(ring_pass, kernel, inputs, rows)
        for step in range(len(ring_pass.hops)):
            # dK and dV, sent at the end of the previous hop, overlap this hop's kernels too.
            travels, parts = tie_transfer_to_kernel(
                [(lane.ring_pass.send_on(lane.hop(step), lane.here), lane.dkv) for lane in lanes],
                [
                    lane.gradients(lane.hop(step), lane.here, ALL if step else lane.first)
                    for lane in lanes
                ],
            )
            for lane, (_, dkv), part in zip(lanes, travels, parts, strict=True):
                lane.dkv = dkv
                lane.add(lane.hop(step), part)
            coming, sums = tie_transfer_to_kernel(
                [keys for keys, _ in travels], [lane.sums for lane in lanes]
            )
            for lane, here, found in zip(lanes, coming, sums, strict=True):
                lane.here, (lane.dq, dkv, lane.dbias, lane.local) = here, found
                lane.dkv = lane.ring_pass.send_home(lane.hop(step), dkv)
        if any(lane.last for lane in lanes):  # the heads of the local block that are left
            for lane in lanes:
                lane.slice_late()
            parts = [lane.gradients(0, lane.local, lane.last) for lane in lanes]
            sent, parts = tie_transfer_to_kernel([lane.dkv for lane in lanes], parts)
            for lane, dkv, part in zip(lanes, sent, parts, strict=True):
                lane.dkv = dkv
                lane.add(0, part)
        dqs, dks, dvs, dbiases = zip(*(lane.grads() for lane in lanes), strict=True)
        dq, dk, dv = (head_halves.joined(x, 2) for x in (dqs, dks, dvs))
        return Grads(dq, dk, dv, dbiases[0])

    def _by_direction(self, ring_pass: RingPass, inputs: Inputs) -> list[tuple[RingPass, Inputs]]:
        """Pair the pass of each direction with the operands of its heads."""
        if self.directions == 1:
            return [(ring_pass, inputs)]
        halves = [head_halves.operands(heads, inputs) for heads in (FIRST, SECOND)]
        made = ring_pass.layout, ring_pass.group
        return [(RingPass(*made, x, way), x) for way, x in zip((1, -1), halves, strict=True)]

    def _backward_lanes(
        self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows
    ) -> list[_BackwardLane]:
        sends, (heads, kv_heads) = len(ring_pass.hops) > 1, (inputs.q.shape[2], inputs.k.shape[2])
        local: list[tuple[Heads | None, Heads | None]] = [(ALL, None)] * self.directions
        parts = [rows]
        if self.both_ways:
            parts = [head_halves.of_rows(half, rows) for half in (FIRST, SECOND)]
            # Lane 0 computes its local keys beside the first transfers, lane 1 beside the last.
            if sends:
                local[1] = None, ALL
        elif sends and may_halve(heads, kv_heads, inputs.mask, inputs.bias is not None):
            local = [(FIRST, SECOND)]
        lanes = zip(self._by_direction(ring_pass, inputs), parts, local, strict=True)
        return [_BackwardLane(*lane, kernel, part, *which) for lane, part, which in lanes]


class _Lane:
    """The heads that travel in one direction, and the keys on this device."""

    def __init__(self, ring_pass: RingPass, inputs: Inputs, kernel: Kernel) -> None:
        self.ring_pass, self.inputs, self.kernel = ring_pass, inputs, kernel
        self.queries = ring_pass.order.to_zigzag(inputs.q, 1)
        self.here = ring_pass.keys(inputs)

    def hop(self, step: int) -> int:
        return self.ring_pass.hops[step]

    def results(self, step: int) -> dict[Piece, Result]:
        hop = self.hop(step)

        def compute(i: int, j: int) -> Result:
            piece = self.ring_pass.inputs(hop, (i, j), self.queries[i], self.here[j])
            return self.kernel.forward(piece)

        return self.ring_pass.pieces(hop, compute)


class _BackwardLane(_Lane):
    """A lane with the gradients of its keys, queries and biases.

    Args:
        first: heads of the local block that are computed first; None for none.
        last: heads of the local block that are computed last, beside the last transfer.
    """

    def __init__(
        self, ring_pass: RingPass, inputs: Inputs, kernel: Kernel, rows: Rows,
        first: Heads | None, last: Heads | None,
    ) -> None:  # fmt: skip
        super().__init__(ring_pass, inputs, kernel)
        self.first, self.last = first, last
        self.local: Keys = self.here if last else []
        self.rows = ring_pass.rows(rows)
        zeros = partial(jnp.zeros_like, dtype="float32")
        summed = self.queries, self.here, ring_pass.biases
        self.dq, self.dkv, self.dbias = jax.tree.map(zeros, summed)

    def gradients(self, hop: int, keys: Keys, heads: Heads | None) -> dict[Piece, Grads]:
        """Compute the gradients of a hop for the given heads; {} if `heads` is None."""
        if heads is None:
            return {}

        def compute(i: int, j: int) -> Grads:
            piece = self.ring_pass.inputs(hop, (i, j), self.queries[i], keys[j])
            return head_halves.backward(self.kernel, heads, piece, self.rows[i])

        return self.ring_pass.pieces(hop, compute, heads)

    @property
    def sums(self) -> Any:
        """The sums that must be computed before the next hop begins."""
        return self.dq, self.dkv, self.dbias, self.local

    def slice_late(self) -> None:
        """If the queries are large, slice queries and `Rows` only when they are read."""
        q = self.inputs.q
        if self.last and q.size * q.dtype.itemsize >= LARGE:
            sliced = self.queries, self.rows
            (self.queries, self.rows), _ = tie_transfer_to_kernel(sliced, self.dq)

    def add(self, hop: int, parts: dict[Piece, Any]) -> None:
        for (i, j), (dq, dk, dv, dbias) in parts.items():
            self.dq[i] = self.dq[i] + dq
            self.dkv[j] = self.dkv[j][0] + dk, self.dkv[j][1] + dv
            self.dbias[i] = self.ring_pass.add_bias(self.dbias[i], dbias, hop, j)

    def grads(self) -> Grads:
        """Return all gradients in contiguous order."""
        back, q, k = self.ring_pass.order.from_zigzag, self.inputs.q, self.inputs.k
        dk, dv = (back([x[p].astype(gradient_dtype(k)) for x in self.dkv], 1) for p in (0, 1))
        dq = back([x.astype(gradient_dtype(q)) for x in self.dq], 1)
        return Grads(dq, dk, dv, self.ring_pass.whole_bias(self.dbias))
