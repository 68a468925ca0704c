"""The backward of a ring among GPUs where every query sees every key.

Each transfer has a kernel beside it. The local keys, from two on, are computed in two halves, the
first one beside the first transfer and the second one beside the last. Another rank's are computed
in two where both the next keys and the last gradients travel beside them:

    computes   local, first half   hop 1           hop 2, first    hop 2, second    ...
    travels    keys of hop 1       keys of hop 2   keys of hop 3   dK,dV of hop 1   ...

    computes   ...   hop n-1         local, second half
    travels    ...   dK,dV of n-2    dK,dV of n-1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Array

from maxattn.context_parallel.ring.hops import RingPass, tie_transfer_to_kernel
from maxattn.kernels.base import Grads, Inputs, Kernel, Rows
from maxattn.kernels.kv_block import (
    WHOLE,
    DqAccumulator,
    KeyRange,
    Packed,
    added,
    middle_key,
    pack,
    total,
)


class Step(NamedTuple):
    """Name what is computed, and what travels beside it.

    Attributes:
        hop: whose keys: those of the rank so many before this one.
        key_range: which range of them.
        fetches: whether the keys of the next hop travel.
        returns: whether the gradients of the hop before this one do.
    """

    hop: int
    key_range: KeyRange
    fetches: bool = False
    returns: bool = False


def steps(ring_size: int, middle: int) -> Iterator[Step]:
    """List the steps of a backward.

    Args:
        ring_size: ranks of the ring.
        middle: the key at which a block that takes two launches is cut; 0: none is.
    """
    last, halves = ring_size - 1, middle > 0
    first, second = KeyRange(0, middle), KeyRange(middle)
    yield Step(0, first if last and halves else WHOLE, fetches=last > 0)
    for hop in range(1, ring_size):
        fetches, returns = hop < last, hop > 1
        if fetches and returns and halves:
            yield from (Step(hop, first, fetches=True), Step(hop, second, returns=True))
        else:
            yield Step(hop, WHOLE, fetches, returns)
    if last and halves:
        yield Step(0, second, returns=True)


def backward(ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
    """Return (dq, dk, dv); the gradients of K and V are complete.

    Args:
        ring_pass: whose every hop is dense.
        kernel: that computes.
        inputs: this device's shards.
        rows: its, of all keys.
    """
    dense = Inputs(inputs.q, inputs.k, inputs.v)
    accumulator = kernel.accumulator(dense, rows)
    made = _DenseBackward(ring_pass, accumulator, dense)
    for step in steps(ring_pass.ring_size, middle_key(inputs.k.shape[1])):
        made.take(step)
    return Grads(accumulator.dq(), *made.of_keys())


class _DenseBackward:
    """Hold the keys and gradients that are here, by hop, and local gradients that came home."""

    def __init__(self, ring_pass: RingPass, accumulator: DqAccumulator, inputs: Inputs) -> None:
        self.ring_pass, self.accumulator = ring_pass, accumulator
        self.dims = inputs.k.shape[3], inputs.v.shape[3]
        self.keys: dict[int, Packed] = {0: pack(inputs.k, inputs.v)}
        self.grads: dict[int, Packed] = {}
        self.home: list[Packed] = []

    def take(self, step: Step) -> None:
        """Begin what travels, and compute beside it."""
        hop, coming, arriving = step.hop, self._coming(step), self._arriving(step)
        self.grads[hop] = self.accumulator.add(self.keys[hop], step.key_range, self.grads.get(hop))
        coming, arriving = self._tied(coming, arriving)
        if hop and step.key_range.stop is None:
            del self.keys[hop]
        if coming is not None:
            self.keys[hop + 1] = coming
        if arriving is not None:
            self.home = added(self.home, arriving)

    def of_keys(self) -> tuple[Array, Array]:
        """Return (dk, dv) of the local keys; gradients that are still here go home uncovered."""
        local = self.grads.pop(0)
        for hop, grads in self.grads.items():
            self.home = added(self.home, self.ring_pass.send_to_owner(hop, grads))
        parts = local, *self.home
        dk, dv = (total([x[i] for x in parts], parts[0][i]).astype(local.dtype) for i in (0, 1))
        return dk[..., : self.dims[0]], dv[..., : self.dims[1]]

    def _coming(self, step: Step) -> Packed | None:
        """Begin the transfer of the next keys."""
        return self.ring_pass.send_on(step.hop, self.keys[step.hop]) if step.fetches else None

    def _arriving(self, step: Step) -> Packed | None:
        """Begin the transfer of the gradients of the hop before this one; at the end, the last."""
        if not step.returns:
            return None
        leaving = (step.hop - 1) % self.ring_pass.ring_size
        return self.ring_pass.send_to_owner(leaving, self.grads.pop(leaving))

    def _tied(
        self, coming: Packed | None, arriving: Packed | None
    ) -> tuple[Packed | None, Packed | None]:
        """Let what the next step sends or computes with be there only now.

        So this step's kernel covers the transfer.
        """
        ours = self.keys, self.grads, self.home, self.accumulator.state
        travels, ours = tie_transfer_to_kernel((coming, arriving), ours)
        self.keys, self.grads, self.home, self.accumulator.state = ours
        return travels
