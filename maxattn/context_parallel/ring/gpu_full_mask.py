"""The backward of a ring among GPUs where every query sees every key: each transfer has a kernel
beside it.

From two keys a place, its own are computed in two halves, the first one beside the first transfer
and the second one beside the last. Another place's are computed in two where both the next keys and
the last gradients travel beside them:

    computes    own, first half   hop 1        hop 2, first   hop 2, second   ...   hop n-1
    own, second half travels     keys of hop 1     of hop 2     of hop 3       dK,dV of hop 1  ...
    dK,dV of n-2     dK,dV of n-1

Where the processors of a GPU would have nothing to do at the end of a launch, some own keys are
computed along with each block that comes (kernels/rounds.py): blocks have room for them, and they
are put there as a block comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Array

from maxattn.context_parallel.ring.hops import Trip, in_step
from maxattn.kernels.base import Kernel, Rows
from maxattn.kernels.dq_accumulator import Sums, added, shares_of, sums_of, total
from maxattn.kernels.kv_block import WHOLE, Cut, Packed, Shares, as_one, put, taken


class Step(NamedTuple):
    """Name what is computed, and what travels beside it.

    Attributes:
        hop: whose keys: those of the place so many before this one.
        cut: which part of them.
        fetches: whether the keys of the next hop travel.
        returns: whether the gradients of the hop before this one do.
    """

    hop: int
    cut: Cut
    fetches: bool = False
    returns: bool = False


def steps(places: int, shares: Shares) -> Iterator[Step]:
    """List the steps of a backward.

    Args:
        places: of the ring.
        shares: how a place's keys are divided.
    """
    last, halves = places - 1, shares.middle > 0
    first = Cut(0, shares.middle)
    yield Step(0, first if last and halves else WHOLE, fetches=last > 0)
    for hop in range(1, places):
        fetches, returns = hop < last, hop > 1
        if fetches and returns and halves:
            yield from (Step(hop, first, fetches=True), Step(hop, Cut(shares.middle), returns=True))
        else:
            yield Step(hop, WHOLE, fetches, returns)
    if last and halves:
        yield Step(0, shares.rest(places), returns=True)


def backward(
    trip: Trip, kernel: Kernel, q: Array, k: Array, v: Array, rows: Rows
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv); the gradients of K and V are complete.

    Args:
        trip: round a ring whose every hop is dense.
        kernel: that computes.
        q, k, v: this device's shards.
        rows: its, of all keys.
    """
    shares = shares_of(kernel, q.shape, k.shape, trip.n)
    made = _Backward(trip, sums_of(kernel, q, k, rows), as_one(k, v, shares.along), shares)
    for step in steps(trip.n, shares):
        made.take(step)
    return made.sums.dq(), *made.of_keys()


class _Backward:
    """Hold the keys and gradients that are here, by hop, and the gradients of this place's own keys
    that came home.
    """

    def __init__(self, trip: Trip, sums: Sums, own: Packed, shares: Shares) -> None:
        self.trip, self.sums, self.shares = trip, sums, shares
        self.length = own.shape[2] - shares.along
        self.keys: dict[int, Packed] = {0: own}
        self.grads: dict[int, Packed] = {}
        self.home: list[Packed] = []

    def take(self, step: Step) -> None:
        """Begin what travels, and compute beside it."""
        hop, coming, arriving = step.hop, None, None
        if step.fetches:
            coming = self.trip.send_on(hop, self.keys[hop])
        if step.returns:
            leaving = (hop - 1) % self.trip.n  # the hop before this one; before the end, the last
            arriving = self.trip.send_to_owner(leaving, self.grads.pop(leaving))
        self.grads[hop] = self.sums.add(self.keys[hop], step.cut, self.grads.get(hop))
        # What the next step sends or computes with is there only now, so that this step's kernel
        # covers the transfer.
        ours = self.keys, self.grads, self.home, self.sums.state
        (coming, arriving), (self.keys, self.grads, self.home, self.sums.state) = in_step(
            (coming, arriving), ours
        )
        if hop and step.cut.stop is None:
            del self.keys[hop]
            self._part(hop)
        if coming is not None:
            self.keys[hop + 1] = self._joined(hop + 1, coming)
        if arriving is not None:
            self.home = added(self.home, arriving)

    def _joined(self, hop: int, block: Packed) -> Packed:
        """Put the own keys that go along with a block into it."""
        if not self.shares.along:
            return block
        return put(taken(self.keys[0], self.shares.guests(hop, self.length)), block, self.length)

    def _part(self, hop: int) -> None:
        """Take the gradients of the own keys that went along out of a block's."""
        if self.shares.along:
            guests = taken(self.grads[hop], Cut(self.length))
            self.grads[0] = put(guests, self.grads[0], self.shares.guests(hop, self.length).start)

    def of_keys(self) -> tuple[Array, Array]:
        """Return (dk, dv) of this place's own keys; gradients that have not left yet leave with
        nothing beside them.
        """
        own = self.grads.pop(0)
        for hop, grads in self.grads.items():
            self.home = added(self.home, self.trip.send_to_owner(hop, grads))
        parts = [x[:, :, : self.length] for x in (own, *self.home)]
        dk, dv = (
            total([x[which] for x in parts], parts[0][which]).astype(own.dtype) for which in (0, 1)
        )
        return dk, dv
