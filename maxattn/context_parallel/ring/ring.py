"""Ring attention: queries stay, K and V go round the devices of the context axis, one block at a
time.

Hop h brings each device the block of the device h places before it. The next block is on its way
while this one is computed. Partial results are merged by log-sum-exp in float32. The backward goes
round again with the global output and LSE, and the gradients of K and V travel with them until they
are home, the last way beside half of the place's own keys (head_halves.py). Hops that the mask
leaves empty on every device are not made, a device skips what is empty for it alone, and uneven
work is evened by zig-zag (zigzag.py, zigzag_pays.py).

Source: Liu et al., Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.all_gather import WholeKeys
from maxattn.context_parallel.base import Collective
from maxattn.context_parallel.lse_merge import merge, nothing_seen
from maxattn.context_parallel.ring import gpu, head_halves
from maxattn.context_parallel.ring.collectives import dealt, hops_of
from maxattn.context_parallel.ring.gpu import zeros
from maxattn.context_parallel.ring.head_halves import ALL, FIRST, SECOND, Heads, may_halve
from maxattn.context_parallel.ring.hops import Keys, Trip, in_step
from maxattn.context_parallel.ring.zigzag import Layout
from maxattn.context_parallel.ring.zigzag_pays import CONTIGUOUS, Balance, balance
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.dq_accumulator import in_place, shares_of
from maxattn.masks import Mask
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target

MODE = "xla_gpu_collective_permute_mode"
COPY_ENGINES = (
    "NCCL takes multiprocessors from the kernels while it moves blocks; "
    f"XLA_FLAGS=--{MODE}=peer has copy engines move them, between GPUs of one process"
)

# Bytes of a device's queries from which halves of them, of out and of dout are cut out only when
# they are read: held all the way, they left the TPU's compiler no memory for transfers beside
# kernels. It covers small ones better without.
LARGE = 2**28


@dataclass(frozen=True)
class Ring(WholeKeys):
    """Attend to one device's keys after the other's, while the next ones travel.

    Args:
        shape: the mesh's axes.
        inner: neighbouring devices that act as one place of the ring (they exchange heads:
            ulysses.py).
        balance: whether places hold two chunks of the sequence each, and why.
        direct: whether every device reaches every other at full rate, as GPUs do: `gpu.py`.
        told: whether XLA has been told how to move blocks between GPUs.
        summed: whether a kernel adds all blocks to one dQ: `kernels/sums.py`.
        room: own keys for which a block that comes has room: `kernels/rounds.py`.
    """

    name: ClassVar[str] = "ring"
    inner: int = 1
    balance: Balance = CONTIGUOUS
    direct: bool = False
    told: bool = False
    summed: bool = False
    room: int = 0

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Choose between contiguous order and zig-zag."""
        return cls(shape).balanced(call, target)

    def balanced(self, call: Call, target: Target) -> Self:
        """Deal the sequence out in zig-zag where that saves more than it costs; see whether
        transfers go straight.
        """
        even = balance(self.places, self.inner, call, self.shape, target)
        told = MODE in dict(target.env).get("XLA_FLAGS", "")
        return replace(self, balance=even, direct=target.platform == "gpu", told=told)

    def over(self, kernel: Kernel, call: Call) -> Self:
        """Learn whether dQ stays in one sum, and for how many keys more a block has room."""
        if self.runs > 1 or self.places == 1 or not call.mask.is_full:
            return self
        one = self.kernel_call(call)
        q, k = (
            (one.batch, t, n, one.head_dim)
            for t, n in ((one.q_len, one.heads), (one.kv_len, one.kv_heads))
        )
        return replace(
            self,
            summed=in_place(kernel, q, k) is not None,
            room=shares_of(kernel, q, k, self.places).along,
        )

    def backward_line(self) -> str:
        """Name the sums block by block, and the keys that go along."""
        along = (
            f"; {self.room} of the own keys along with each block, so that fewer processors wait"
        )
        return (
            "the library's own, block by block" + (along if self.room else "")
            if self.summed
            else ""
        )

    @property
    def places(self) -> int:
        """The places of the ring."""
        return ways("S", self.shape) // self.inner

    @property
    def layout(self) -> Layout:
        """Which part of the sequence each place holds."""
        return Layout(self.places, self.runs)

    @property
    def runs(self) -> int:
        """Contiguous parts of the sequence that a place holds."""
        return 2 if self.balance.zigzag else 1

    def unit(self) -> int:
        """Lengths are padded to whole runs of every device."""
        return super().unit() * self.runs

    def label(self) -> str:
        """Name the layout too, where it is zig-zag."""
        return super().label() + (", zig-zag" if self.balance.zigzag else "")

    def notes(self) -> tuple[str, ...]:
        """Say why the order is zig-zag, or why uneven work stays uneven, and what makes transfers
        cheaper on GPUs.
        """
        why = (self.balance.why,) if self.balance.why else ()
        return why + ((COPY_ENGINES,) if self.direct and self.places > 1 and not self.told else ())

    def kv_letter(self) -> str:
        """Keys stay split over context."""
        return "S"

    def place_call(self, call: Call) -> Call:
        """Return the call of one hop: this place's queries against one place's keys."""
        return replace(super().local_call(call), kv_len=-(-call.kv_len // self.places))

    def local_call(self, call: Call) -> Call:
        """Return the call of one kernel: a run of queries against a run of keys."""
        place = self.place_call(call)
        return replace(place, q_len=place.q_len // self.runs, kv_len=place.kv_len // self.runs)

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the deal to zig-zag and back, the hops of K and V, and of their gradients on the way
        home.
        """
        place = self.place_call(call)
        sends = len(self.hops(call.mask, call.q_len, call.kv_len)) - 1
        deals = dealt(call, place, self.shape, self) if self.runs > 1 else ()
        return (*deals, *hops_of(place, sends, self.runs, self.direct, self.room))

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List the hops in which at least one device has something to compute; hop 0 is always
        made.
        """
        return self.layout.hops(mask, q_len, kv_len)

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        q, k, v, bias, mask, _, _ = inputs.operands
        trip = Trip(self.layout, self.inner, q, k, mask, bias)
        if self.direct:
            return gpu.forward(trip, kernel, q, k, v)
        queries, here = trip.deal.out(q, 1), trip.keys(k, v)
        totals = [nothing_seen((x, x[..., 0].swapaxes(1, 2))) for x in queries]
        for hop in trip.made:

            def attend(i: int, j: int, hop: int = hop, here: Any = here) -> Any:
                return kernel.forward(Inputs(queries[i], *here[j], *trip.operands(hop, i, j)))

            coming, parts = in_step(trip.send_on(hop, here), trip.pieces(hop, attend, nothing_seen))
            for (i, _), part in parts.items():
                totals[i] = merge(totals[i], part)
            here, totals = in_step(coming, totals)
        out, lse = ([t[x] for t in totals] for x in (0, 1))
        out = trip.deal.back([x.astype(q.dtype) for x in out], 1)
        return Result(out, trip.deal.back(lse, 2))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; those of its K and V have been round the ring and are
        complete.
        """
        q, k, v, bias, mask, _, _ = inputs.operands
        trip = Trip(self.layout, self.inner, q, k, mask, bias)
        if self.direct:
            return gpu.backward(trip, kernel, q, k, v, rows)
        queries, here = trip.deal.out(q, 1), trip.keys(k, v)
        halved = len(trip.made) > 1 and may_halve(q.shape[2], k.shape[2], mask, bias is not None)
        own = here if halved else None
        row_runs = trip.deal_rows(rows)
        dqs, dkvs, dbs = zeros(queries), zeros(here), zeros(trip.biases)

        def computed(hop: int, keys: Keys, heads: Heads = ALL) -> dict[tuple[int, int], Any]:
            def gradients(i: int, j: int) -> Any:
                piece = Inputs(queries[i], *keys[j], *trip.operands(hop, i, j))
                return head_halves.backward(kernel, heads, piece, row_runs[i])

            return trip.pieces(hop, gradients, zeros)

        def add(hop: int, parts: dict[tuple[int, int], Any]) -> None:
            for (i, j), (dq, dk, dv, db) in parts.items():
                dqs[i], dkvs[j] = dqs[i] + dq, (dkvs[j][0] + dk, dkvs[j][1] + dv)
                dbs[i] = trip.add_bias(dbs[i], db, hop, j)

        for hop in trip.made:
            parts = computed(hop, here, FIRST if halved and hop == 0 else ALL)
            # Of dkvs too the transfer, begun at the end of the last hop, gets nothing but this
            # hop's kernels beside it.
            (coming, dkvs), parts = in_step((trip.send_on(hop, here), dkvs), parts)
            add(hop, parts)
            here, (dqs, dkvs, dbs, own) = in_step(coming, (dqs, dkvs, dbs, own))
            dkvs = trip.send_home(hop, dkvs)
        if own is not None:
            if q.size * q.dtype.itemsize >= LARGE:
                (queries, row_runs), _ = in_step((queries, row_runs), dqs)
            dkvs, parts = in_step(dkvs, computed(0, own, SECOND))
            add(0, parts)
        dk, dv = (trip.deal.back([x[p].astype(k.dtype) for x in dkvs], 1) for p in (0, 1))
        dq = trip.deal.back([x.astype(q.dtype) for x in dqs], 1)
        return Grads(dq, dk, dv, trip.whole_bias(dbs))
