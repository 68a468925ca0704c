"""The backward of a ring among GPUs where every query sees every key.

Each transfer has a kernel beside it. The local keys, from two on, are computed in two halves, the
first one beside the first transfer and the second one beside the last. Another rank's are computed
in two where both the next keys and the last gradients travel beside them:

    computes   local, first half   hop 1           hop 2, first    hop 2, second    ...
    travels    keys of hop 1       keys of hop 2   keys of hop 3   dK,dV of hop 1   ...

    computes   ...   hop n-1         local, second half
    travels    ...   dK,dV of n-2    dK,dV of n-1

Where the last wave of a launch would not be full, some local keys are computed in the launch over
each block that comes: blocks have spare keys, which are filled as a block comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import Array

from maxattn.context_parallel.ring.hops import RingPass, tie_transfer_to_kernel
from maxattn.kernels.base import Grads, Inputs, Kernel, Rows
from maxattn.kernels.dq_accumulator import DqAccumulator, added, total
from maxattn.kernels.kv_block import WHOLE, KeyRange, KeySplit, Packed, pack, slice_keys, write_keys


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


class LocalKvFiller(NamedTuple):
    """Fill the spare keys of other ranks' blocks with local keys: the last ones, hop by hop.

    Args:
        length: keys of a rank.
        spare_keys: as in `KeySplit`: room at the end of each block.
    """

    length: int
    spare_keys: int

    def keys_of(self, hop: int) -> KeyRange:
        """Return which local keys fill the block of a hop."""
        start = self.length - hop * self.spare_keys
        return KeyRange(start, start + self.spare_keys)

    def fill(self, hop: int, block: Packed, local: Packed) -> Packed:
        """Return the block of a hop with local keys in its spare ones."""
        if not self.spare_keys:
            return block
        return write_keys(slice_keys(local, self.keys_of(hop)), block, self.length)

    def take_back(self, hop: int, grads: Packed, local: Packed) -> Packed:
        """Return the gradients of the local keys, with those that came with the block of a hop."""
        if not self.spare_keys:
            return local
        return write_keys(slice_keys(grads, KeyRange(self.length)), local, self.keys_of(hop).start)

    def without(self, block: Packed) -> Packed:
        """Return a block without its spare keys."""
        return block[:, :, : self.length]


def steps(ring_size: int, split: KeySplit) -> Iterator[Step]:
    """List the steps of a backward.

    Args:
        ring_size: ranks of the ring.
        split: how a rank's keys are divided over launches.
    """
    last, halves = ring_size - 1, split.middle > 0
    first, second = KeyRange(0, split.middle), KeyRange(split.middle)
    yield Step(0, first if last and halves else WHOLE, fetches=last > 0)
    for hop in range(1, ring_size):
        fetches, returns = hop < last, hop > 1
        if fetches and returns and halves:
            yield from (Step(hop, first, fetches=True), Step(hop, second, returns=True))
        else:
            yield Step(hop, WHOLE, fetches, returns)
    if last and halves:
        yield Step(0, local_rest(split, ring_size), returns=True)


def local_rest(split: KeySplit, ring_size: int) -> KeyRange:
    """Return the local keys after the first half, less those that fill other ranks' blocks.

    The local block itself has spare keys at its end too, which stay empty.
    """
    return KeyRange(split.middle, -ring_size * split.spare_keys or None)


def spare_keys(ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> int:
    """Return the spare keys that blocks have in this backward; 0 where a mask forbids something."""
    if not ring_pass.is_dense:
        return 0
    return kernel.split_keys(inputs, ring_pass.ring_size).spare_keys


def backward(ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
    """Return (dq, dk, dv); the gradients of K and V are complete.

    Args:
        ring_pass: whose every hop is dense.
        kernel: that computes.
        inputs: this device's shards.
        rows: its, of all keys.
    """
    dense = Inputs(inputs.q, inputs.k, inputs.v)
    split = kernel.split_keys(dense, ring_pass.ring_size)
    accumulator = kernel.accumulator(dense, rows)
    made = _DenseBackward(ring_pass, accumulator, dense, split)
    for step in steps(ring_pass.ring_size, split):
        made.take(step)
    return Grads(accumulator.dq(), *made.of_keys())


class _DenseBackward:
    """Hold the keys and gradients that are here, by hop, and local gradients that came home."""

    def __init__(
        self, ring_pass: RingPass, accumulator: DqAccumulator, inputs: Inputs, split: KeySplit
    ) -> None:
        self.ring_pass, self.accumulator = ring_pass, accumulator
        self.dims = inputs.k.shape[3], inputs.v.shape[3]
        self.local_kv_filler = LocalKvFiller(inputs.k.shape[1], split.spare_keys)
        self.keys: dict[int, Packed] = {0: pack(inputs.k, inputs.v, split.spare_keys)}
        self.grads: dict[int, Packed] = {}
        self.home: list[Packed] = []

    def take(self, step: Step) -> None:
        """Begin what travels, and compute beside it."""
        hop, coming, arriving = step.hop, self._coming(step), self._arriving(step)
        self.grads[hop] = self.accumulator.add(self.keys[hop], step.key_range, self.grads.get(hop))
        coming, arriving = self._tied(coming, arriving)
        if hop and step.key_range.stop is None:
            self._finish(hop)
        if coming is not None:
            self.keys[hop + 1] = self.local_kv_filler.fill(hop + 1, coming, self.keys[0])
        if arriving is not None:
            self.home = added(self.home, arriving)

    def of_keys(self) -> tuple[Array, Array]:
        """Return (dk, dv) of the local keys; gradients that are still here go home uncovered."""
        local = self.grads.pop(0)
        for hop, grads in self.grads.items():
            self.home = added(self.home, self.ring_pass.send_to_owner(hop, grads))
        parts = [self.local_kv_filler.without(x) for x in (local, *self.home)]
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

    def _finish(self, hop: int) -> None:
        """Drop the keys of a hop, and take the gradients of local keys out of its block's."""
        del self.keys[hop]
        self.grads[0] = self.local_kv_filler.take_back(hop, self.grads[hop], self.grads[0])
