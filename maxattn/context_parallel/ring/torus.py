"""The schedule of a ring among TPUs and CPUs, whose devices reach their neighbours alone.

The next block of K and V travels while this one is computed. dK and dV travel with their K and V
until they are home; the last transfer has half of the local block beside it (head_halves.py).
Partial results are merged by log-sum-exp in float32 hop by hop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from maxattn.call import Call
from maxattn.context_parallel.base import Collective, itemsize
from maxattn.context_parallel.lse_merge import merge, nothing_seen
from maxattn.context_parallel.ring import head_halves
from maxattn.context_parallel.ring.collectives import hop_collectives, kv_bytes
from maxattn.context_parallel.ring.head_halves import ALL, FIRST, SECOND, Heads, may_halve
from maxattn.context_parallel.ring.hops import Keys, Piece, RingPass, tie_transfer_to_kernel
from maxattn.context_parallel.ring.schedule import Schedule, unseen, zeros
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows

# Bytes of a device's queries from which halves of them, of out and of dout are sliced only when
# they are read: held all the way, they left the TPU's compiler no memory for transfers beside
# kernels. It covers small ones better without.
LARGE = 2**28


@dataclass(frozen=True)
class TorusSchedule(Schedule):
    """Send gradients of K and V along with K and V, from neighbour to neighbour."""

    def collectives(self, call: Call, sends: int, chunks_per_rank: int) -> tuple[Collective, ...]:
        """Name the hops; gradients go one hop further, home, in float32."""
        block, grads = kv_bytes(call, itemsize(call.dtype)), kv_bytes(call, 4)
        return hop_collectives(sends, block, (sends + 1, grads), arrays=2 * chunks_per_rank)

    def forward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        queries, here = ring_pass.order.to_zigzag(inputs.q, 1), ring_pass.keys(inputs)
        totals = [unseen(x, inputs.v.shape[3]) for x in queries]
        for hop in ring_pass.hops:

            def attend(i: int, j: int, hop: int = hop, here: Keys = here) -> Result:
                return kernel.forward(ring_pass.inputs(hop, (i, j), queries[i], here[j]))

            coming, parts = tie_transfer_to_kernel(
                ring_pass.send_on(hop, here), ring_pass.pieces(hop, attend, nothing_seen)
            )
            for (i, _), part in parts.items():
                totals[i] = merge(totals[i], part)
            here, totals = tie_transfer_to_kernel(coming, totals)
        return ring_pass.result(totals, inputs.q)

    def backward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; those of its K and V have been round the ring."""
        made = _TorusBackward(ring_pass, kernel, inputs, rows)
        for hop in ring_pass.hops:
            made.take(hop)
        made.finish_local()
        return made.grads()


class _TorusBackward:
    """Hold the keys that are here, their gradients, and those of the queries and biases."""

    def __init__(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> None:
        self.ring_pass, self.kernel, self.like = ring_pass, kernel, inputs
        self.queries = ring_pass.order.to_zigzag(inputs.q, 1)
        self.here = ring_pass.keys(inputs)
        self.halved = _is_halved(ring_pass, inputs)
        self.local: Keys | None = self.here if self.halved else None
        self.rows = ring_pass.rows(rows)
        self.dq, self.dkv, self.dbias = (
            zeros(x) for x in (self.queries, self.here, ring_pass.biases)
        )

    def take(self, hop: int) -> None:
        """Compute a hop while its keys, and the gradients of the last hop, travel on."""
        ring_pass = self.ring_pass
        parts = self._computed(hop, self.here, FIRST if self.halved and hop == 0 else ALL)
        # The transfer of dkv too, begun at the end of the last hop, gets nothing but this hop's
        # kernels beside it.
        travels = ring_pass.send_on(hop, self.here), self.dkv
        (coming, self.dkv), parts = tie_transfer_to_kernel(travels, parts)
        self._add(hop, parts)
        sums = self.dq, self.dkv, self.dbias, self.local
        self.here, sums = tie_transfer_to_kernel(coming, sums)
        self.dq, self.dkv, self.dbias, self.local = sums
        self.dkv = ring_pass.send_home(hop, self.dkv)

    def finish_local(self) -> None:
        """Compute the second half of the local block beside the last transfer."""
        if self.local is None:
            return
        q = self.like.q
        if q.size * q.dtype.itemsize >= LARGE:
            sliced = self.queries, self.rows
            (self.queries, self.rows), _ = tie_transfer_to_kernel(sliced, self.dq)
        parts = self._computed(0, self.local, SECOND)
        self.dkv, parts = tie_transfer_to_kernel(self.dkv, parts)
        self._add(0, parts)

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

    def _add(self, hop: int, parts: dict[Piece, Any]) -> None:
        for (i, j), (dq, dk, dv, dbias) in parts.items():
            self.dq[i] = self.dq[i] + dq
            self.dkv[j] = self.dkv[j][0] + dk, self.dkv[j][1] + dv
            self.dbias[i] = self.ring_pass.add_bias(self.dbias[i], dbias, hop, j)


def _is_halved(ring_pass: RingPass, inputs: Inputs) -> bool:
    """Tell whether the local block is computed in two halves of the heads."""
    if len(ring_pass.hops) == 1:
        return False
    heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    return may_halve(heads, kv_heads, inputs.mask, inputs.bias is not None)
