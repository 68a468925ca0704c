"""The schedule of a ring among TPUs and CPUs, whose devices reach their neighbours alone.

The next block of K and V travels while this one is computed. dK and dV travel with their K and V
until they are home; the last transfer has half of the local block beside it (head_halves.py).
Partial results are merged by log-sum-exp in float32 hop by hop. Where blocks travel both ways
(choices.py) there are two lanes, each with half of the heads, whose hops begin together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxattn.call import Call
from maxattn.context_parallel.base import Collective, itemsize
from maxattn.context_parallel.ring import head_halves
from maxattn.context_parallel.ring.collectives import hop_collectives, kv_bytes
from maxattn.context_parallel.ring.head_halves import (
    ALL,
    FIRST,
    SECOND,
    Heads,
    joined_heads,
    may_halve,
)
from maxattn.context_parallel.ring.hops import Keys, Piece, RingPass, tie_transfer_to_kernel
from maxattn.context_parallel.ring.schedule import Schedule, nothing_seen, unseen, zeros
from maxattn.context_parallel.timeline import FLOAT, Share, Traffic
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.softmax import merge_by_lse

# Bytes of a device's queries from which halves of them, of out and of dout are sliced only when
# they are read: held all the way, they left the TPU's compiler no memory for transfers beside
# kernels. It covers small ones better without.
LARGE = 2**28


@dataclass(frozen=True)
class TorusSchedule(Schedule):
    """Send gradients of K and V along with K and V, from neighbour to neighbour.

    Args:
        both_ways: whether halves of the heads go round in opposite directions.
    """

    both_ways: bool = False

    @property
    def directions(self) -> int:
        """In how many directions blocks travel at once."""
        return 2 if self.both_ways else 1

    def collectives(self, call: Call, sends: int, chunks_per_rank: int) -> tuple[Collective, ...]:
        """Name the hops; gradients go one hop further, home, in float32."""
        block, grads = kv_bytes(call, itemsize(call.dtype)), kv_bytes(call, 4)
        arrays = 2 * chunks_per_rank * self.directions
        return hop_collectives(sends, block, (sends + 1, grads), arrays)

    def traffic(self, hops: int, share: Share, hop: Call) -> Traffic:
        """Gradients travel and are summed in float32.

        Held are two blocks of K and V, or three, and float32 sums, those of the queries too. out,
        dq, dk and dv are read and written in float32, and a part of each is read.
        """
        q, kv, item, _ = share
        halved = may_halve(hop.heads, hop.kv_heads, hop.mask, hop.bias is not None)
        held = (2 + halved + 2 * FLOAT / item) * kv + 2 * FLOAT / item * q
        merged = (2 * FLOAT + item) / item * (2 * q + kv) * hops
        return Traffic(FLOAT, False, halved, held, merged)

    def forward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        lanes = [
            _TorusForward(ring_pass.with_inputs(part, way), kernel, part)
            for way, part in self._by_direction(inputs)
        ]
        for step in range(len(ring_pass.hops)):
            # All transfers have begun before any kernel is waited for.
            coming, parts = tie_transfer_to_kernel(
                [lane.sent(step) for lane in lanes], [lane.computed(step) for lane in lanes]
            )
            for lane, part in zip(lanes, parts, strict=True):
                lane.add(part)
            coming, totals = tie_transfer_to_kernel(coming, [lane.totals for lane in lanes])
            for lane, here, total in zip(lanes, coming, totals, strict=True):
                lane.here, lane.totals = here, total
        outs, lses = zip(*(lane.result() for lane in lanes), strict=True)
        return Result(joined_heads(outs, 2), joined_heads(lses, 1))

    def backward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; those of its K and V have been round the ring."""
        lanes = self._backward_lanes(ring_pass, kernel, inputs, rows)
        for step in range(len(ring_pass.hops)):
            _take(lanes, step)
        if any(lane.last for lane in lanes):
            _finish_local(lanes)
        dqs, dks, dvs, dbiases = zip(*(lane.grads() for lane in lanes), strict=True)
        dq, dk, dv = (joined_heads(x, 2) for x in (dqs, dks, dvs))
        return Grads(dq, dk, dv, dbiases[0])

    def _by_direction(self, inputs: Inputs) -> list[tuple[int, Inputs]]:
        """Pair each way with the operands of the heads that go it."""
        if self.directions == 1:
            return [(1, inputs)]
        halves = (head_halves.operands(heads, inputs) for heads in (FIRST, SECOND))
        return list(zip((1, -1), halves, strict=True))

    def _backward_lanes(
        self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows
    ) -> list[_TorusBackward]:
        if self.directions == 1:
            local = (FIRST, SECOND) if _is_halved(ring_pass, inputs) else (ALL, None)
            return [_TorusBackward(ring_pass, kernel, inputs, rows, *local)]
        # The local block of one lane has the first transfers beside it, the other's the last ones.
        local = [(ALL, None), (None, ALL)] if len(ring_pass.hops) > 1 else [(ALL, None)] * 2
        halves = [head_halves.of_rows(heads, rows) for heads in (FIRST, SECOND)]
        return [
            _TorusBackward(ring_pass.with_inputs(part, way), kernel, part, half, *which)
            for (way, part), half, which in zip(
                self._by_direction(inputs), halves, local, strict=True
            )
        ]


class _TorusForward:
    """Hold the keys that are here and what was computed so far, of the heads that go one way."""

    def __init__(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> None:
        self.ring_pass, self.kernel, self.like = ring_pass, kernel, inputs.q
        self.queries, self.here = ring_pass.order.to_zigzag(inputs.q, 1), ring_pass.keys(inputs)
        self.totals = [unseen(x, inputs.v.shape[3]) for x in self.queries]

    def sent(self, step: int) -> Keys:
        """Send the keys that are here on."""
        return self.ring_pass.send_on(self.ring_pass.hops[step], self.here)

    def computed(self, step: int) -> dict[Piece, Result]:
        """Attend to the keys that are here."""
        hop = self.ring_pass.hops[step]

        def attend(i: int, j: int) -> Result:
            piece = self.ring_pass.inputs(hop, (i, j), self.queries[i], self.here[j])
            return self.kernel.forward(piece)

        return self.ring_pass.pieces(hop, attend, nothing_seen)

    def add(self, parts: dict[Piece, Result]) -> None:
        """Merge what a hop computed."""
        for (i, _), part in parts.items():
            self.totals[i] = Result(*merge_by_lse((self.totals[i], part)))

    def result(self) -> Result:
        """Return (out, lse) in contiguous order."""
        return self.ring_pass.result(self.totals, self.like)


class _TorusBackward:
    """Hold the keys that are here, their gradients, and those of the queries and biases.

    Args:
        first: heads of the local block that are computed before all others; None: none.
        last: those that are computed after all others, beside the last transfer.
    """

    def __init__(
        self,
        ring_pass: RingPass,
        kernel: Kernel,
        inputs: Inputs,
        rows: Rows,
        first: Heads | None,
        last: Heads | None,
    ) -> None:
        self.ring_pass, self.kernel, self.like = ring_pass, kernel, inputs
        self.queries = ring_pass.order.to_zigzag(inputs.q, 1)
        self.here = ring_pass.keys(inputs)
        self.first, self.last = first, last
        self.local: Keys | None = self.here if last else None
        self.rows = ring_pass.rows(rows)
        self.dq, self.dkv, self.dbias = (
            zeros(x) for x in (self.queries, self.here, ring_pass.biases)
        )

    def travels(self, step: int) -> Any:
        """Send the keys on; their gradients, begun at the end of the last hop, travel too."""
        return self.ring_pass.send_on(self.ring_pass.hops[step], self.here), self.dkv

    def computed(self, step: int) -> dict[Piece, Grads]:
        """Compute a hop; of the local block the first heads."""
        hop = self.ring_pass.hops[step]
        heads = self.first if hop == 0 else ALL
        return self._computed(hop, self.here, heads) if heads else {}

    def computed_last(self) -> dict[Piece, Grads]:
        """Compute the last heads of the local block."""
        if self.last is None or self.local is None:
            return {}
        return self._computed(0, self.local, self.last)

    @property
    def sums(self) -> Any:
        """What must be there before the next hop begins."""
        return self.dq, self.dkv, self.dbias, self.local

    def go_on(self, step: int, here: Keys, sums: Any) -> None:
        """Take the next keys, and send the gradients of the last ones after them."""
        self.here, (self.dq, self.dkv, self.dbias, self.local) = here, sums
        self.dkv = self.ring_pass.send_home(self.ring_pass.hops[step], self.dkv)

    def slice_late(self) -> None:
        """Slice queries and rows only where they are read, if they are large."""
        q = self.like.q
        if self.last and q.size * q.dtype.itemsize >= LARGE:
            sliced = self.queries, self.rows
            (self.queries, self.rows), _ = tie_transfer_to_kernel(sliced, self.dq)

    def add(self, step: int | None, parts: dict[Piece, Any]) -> None:
        """Add what a hop computed; None: the last heads of the local block."""
        hop = 0 if step is None else self.ring_pass.hops[step]
        for (i, j), (dq, dk, dv, dbias) in parts.items():
            self.dq[i] = self.dq[i] + dq
            self.dkv[j] = self.dkv[j][0] + dk, self.dkv[j][1] + dv
            self.dbias[i] = self.ring_pass.add_bias(self.dbias[i], dbias, hop, j)

    def grads(self) -> Grads:
        """Return all gradients, in contiguous order."""
        back, q, k = self.ring_pass.order.from_zigzag, self.like.q, self.like.k
        dk, dv = (back([x[p].astype(k.dtype) for x in self.dkv], 1) for p in (0, 1))
        dq = back([x.astype(q.dtype) for x in self.dq], 1)
        return Grads(dq, dk, dv, self.ring_pass.whole_bias(self.dbias))

    def _computed(self, hop: int, keys: Keys, heads: Heads) -> dict[Piece, Grads]:
        def gradients(i: int, j: int) -> Grads:
            piece = self.ring_pass.inputs(hop, (i, j), self.queries[i], keys[j])
            return head_halves.backward(self.kernel, heads, piece, self.rows[i])

        return self.ring_pass.pieces(hop, gradients, zeros, heads)


def _take(lanes: list[_TorusBackward], step: int) -> None:
    """Compute a hop while its keys, and the gradients of the last hop, travel on."""
    # The transfer of dkv too, begun at the end of the last hop, gets nothing but this hop's
    # kernels beside it.
    travels, parts = tie_transfer_to_kernel(
        [lane.travels(step) for lane in lanes], [lane.computed(step) for lane in lanes]
    )
    for lane, (_, dkv), part in zip(lanes, travels, parts, strict=True):
        lane.dkv = dkv
        lane.add(step, part)
    coming = [keys for keys, _ in travels]
    coming, sums = tie_transfer_to_kernel(coming, [lane.sums for lane in lanes])
    for lane, here, kept in zip(lanes, coming, sums, strict=True):
        lane.go_on(step, here, kept)


def _finish_local(lanes: list[_TorusBackward]) -> None:
    """Compute the rest of the local block beside the last transfers."""
    for lane in lanes:
        lane.slice_late()
    parts = [lane.computed_last() for lane in lanes]
    sent, parts = tie_transfer_to_kernel([lane.dkv for lane in lanes], parts)
    for lane, dkv, part in zip(lanes, sent, parts, strict=True):
        lane.dkv = dkv
        lane.add(None, part)


def _is_halved(ring_pass: RingPass, inputs: Inputs) -> bool:
    """Tell whether the local block is computed in two halves of the heads."""
    if len(ring_pass.hops) == 1:
        return False
    heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    return may_halve(heads, kv_heads, inputs.mask, inputs.bias is not None)
