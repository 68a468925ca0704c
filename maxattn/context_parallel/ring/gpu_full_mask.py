"""The backward of a ring among GPUs if every query sees every key.

Each transfer has a kernel beside it. The local keys, if there are two or more, are computed in two
halves: one beside the first transfer, one beside the last. Another rank's keys are computed in two
halves if both the next keys and the previous gradients travel meanwhile:

    computes   local, first half   hop 1           hop 2, first    hop 2, second    ...
    travels    keys of hop 1       keys of hop 2   keys of hop 3   dK,dV of hop 1   ...

    computes   ...   hop n-1         local, second half
    travels    ...   dK,dV of n-2    dK,dV of n-1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from maxattn.context_parallel.ring.hops import RingPass, tie_transfer_to_kernel
from maxattn.kernels.base import Grads, Inputs, Kernel, Rows
from maxattn.kernels.kv_block import WHOLE, KeyRange, Packed, added, middle_key, pack, total


class RingStep(NamedTuple):
    """One kernel of the backward, and the transfer beside it."""

    hop: int  # distance to the keys' owner: hop h has the keys of the rank h places before this one
    key_range: KeyRange  # the range of keys that the kernel computes
    fetches: bool = False  # whether the keys of the next hop travel
    returns: bool = False  # whether the gradients of the previous hop's keys travel


def steps(ring_size: int, middle: int) -> Iterator[RingStep]:
    """List the steps of a backward; a positive `middle` is the key at which blocks are halved."""
    last, halves = ring_size - 1, middle > 0
    first, second = KeyRange(0, middle), KeyRange(middle)
    yield RingStep(0, first if last and halves else WHOLE, fetches=last > 0)
    for hop in range(1, ring_size):
        fetches, returns = hop < last, hop > 1
        if fetches and returns and halves:
            yield from (RingStep(hop, first, fetches=True), RingStep(hop, second, returns=True))
        else:
            yield RingStep(hop, WHOLE, fetches, returns)
    if last and halves:
        yield RingStep(0, second, returns=True)


def backward(ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
    """Return this device's gradients in a dense pass; dK and dV are summed over the ring."""
    n, dims = ring_pass.ring_size, (inputs.k.shape[3], inputs.v.shape[3])
    accumulator = kernel.accumulator(Inputs(inputs.q, inputs.k, inputs.v), rows)
    # By hop: the keys on this device, and their gradients.
    keys: dict[int, Packed] = {0: pack(inputs.k, inputs.v)}
    grads: dict[int, Packed] = {}
    home: list[Packed] = []  # gradients of local keys that other ranks sent
    for hop, key_range, fetches, returns in steps(n, middle_key(inputs.k.shape[1])):
        coming = ring_pass.send_on(hop, keys[hop]) if fetches else None
        before = (hop - 1) % n  # before hop 0 at the end, the last hop
        arriving = ring_pass.send_to_owner(before, grads.pop(before)) if returns else None
        grads[hop] = accumulator.add(keys[hop], key_range, grads.get(hop))
        # The next step's operands depend on this step's kernel, which thus overlaps the transfers.
        ours = keys, grads, home, accumulator.state
        (coming, arriving), ours = tie_transfer_to_kernel((coming, arriving), ours)
        keys, grads, home, accumulator.state = ours
        if hop and key_range.stop is None:
            del keys[hop]
        if coming is not None:
            keys[hop + 1] = coming
        if arriving is not None:
            home = added(home, arriving)
    local = grads.pop(0)
    for hop, late in grads.items():  # gradients of keys that are not halved: exposed
        home = added(home, ring_pass.send_to_owner(hop, late))
    parts = local, *home
    dk, dv = (total([x[i] for x in parts], local[i]).astype(local.dtype) for i in (0, 1))
    return Grads(accumulator.dq(), dk[..., : dims[0]], dv[..., : dims[1]])
