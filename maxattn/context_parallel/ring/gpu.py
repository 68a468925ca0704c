"""A ring among GPUs: every device reaches every other at full rate, and one transfer at a time runs
beside a kernel.

XLA keeps one collective in flight on a GPU: a second one beside the same kernel is waited for. So K
and V travel as one array; the gradients of a hop's keys go straight home, in the dtype of K, while
the next hop is computed, and are summed there in float32. Partial results are kept as the kernel
wrote them, and merged or summed in one pass. Where every pair is allowed, no transfer of the
backward is without a kernel beside it: `gpu_full_mask.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.context_parallel.lse_merge import merge_all, nothing_seen
from maxattn.context_parallel.ring import gpu_full_mask
from maxattn.context_parallel.ring.hops import Keys, Trip, in_step
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.dq_accumulator import MOST_PARTS, added, shares_of, total
from maxattn.kernels.kv_block import Packed, as_one


def forward(trip: Trip, kernel: Kernel, q: Array, k: Array, v: Array) -> Result:
    """Return this device's (out, lse)."""
    # Packed as for the backward: where one program has both, they share it.
    room = shares_of(kernel, q.shape, k.shape, trip.n).along if trip.is_dense else 0
    queries, packed = trip.deal.out(q, 1), _packed(trip.keys(k, v), room)
    parts: list[list[Any]] = [[] for _ in trip.runs]
    for hop in trip.made:

        def attend(i: int, j: int, hop: int = hop, packed: Packed = packed) -> Any:
            here = _unpacked(packed, trip.kv_run)[j]
            return kernel.forward(Inputs(queries[i], *here, *trip.operands(hop, i, j)))

        packed, found = in_step(trip.send_on(hop, packed), trip.pieces(hop, attend, nothing_seen))
        for (i, _), part in found.items():
            parts[i] = (
                [merge_all(parts[i]), part] if len(parts[i]) >= MOST_PARTS else [*parts[i], part]
            )
    nothing = [nothing_seen((x, x[..., 0].swapaxes(1, 2))) for x in queries]
    out, lse = zip(
        *(merge_all(p) if p else none for p, none in zip(parts, nothing, strict=True)), strict=True
    )
    out = trip.deal.back([x.astype(q.dtype) for x in out], 1)
    return Result(out, trip.deal.back(list(lse), 2))


def backward(trip: Trip, kernel: Kernel, q: Array, k: Array, v: Array, rows: Rows) -> Grads:
    """Return this device's gradients; those of its K and V are complete."""
    if trip.is_dense:
        return Grads(*gpu_full_mask.backward(trip, kernel, q, k, v, rows))
    queries, packed, home = trip.deal.out(q, 1), _packed(trip.keys(k, v)), _Home(trip)
    row_runs = trip.deal_rows(rows)
    dqs: list[list[Array]] = [[] for _ in trip.runs]
    dbs: list[Any] = zeros(trip.biases)
    for hop in trip.made:

        def gradients(i: int, j: int, hop: int = hop, packed: Packed = packed) -> Any:
            here = _unpacked(packed)[j]
            return kernel.backward(
                Inputs(queries[i], *here, *trip.operands(hop, i, j)), row_runs[i]
            )

        found = trip.pieces(hop, gradients, zeros)
        (packed, home.arrived), found = in_step((trip.send_on(hop, packed), home.sent()), found)
        for (i, j), (dq, _, _, db) in found.items():
            dqs[i], dbs[i] = added(dqs[i], dq), trip.add_bias(dbs[i], db, hop, j)
        home.leave(hop, _gradients_of_keys(trip, found, packed))
    summed = _unpacked(home.total())
    dk, dv = (trip.deal.back([pair[which] for pair in summed], 1) for which in (0, 1))
    dq = [total(parts, x).astype(q.dtype) for parts, x in zip(dqs, queries, strict=True)]
    return Grads(trip.deal.back(dq, 1), dk, dv, trip.whole_bias(dbs))


def zeros(tree: Any) -> Any:
    """Give float32 zeros, in the shapes of arrays or of what describes them."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


class _Home:
    """Send the gradients of other places' keys to them, one hop late, and sum what comes in."""

    def __init__(self, trip: Trip) -> None:
        self.trip, self.hop = trip, 0
        self.leaving: Packed | None = None
        self.arrived: Packed | None = None
        self._parts: list[Packed] = []

    def sent(self) -> Packed | None:
        """Begin the transfer of what is leaving."""
        return None if self.leaving is None else self.trip.send_to_owner(self.hop, self.leaving)

    def leave(self, hop: int, grads: Packed) -> None:
        """Take what has arrived, and gradients that leave next; those of this place's own keys
        stay.
        """
        self._take(self.arrived)
        self.arrived, self.leaving, self.hop = None, grads, hop
        if hop == 0:
            self._parts, self.leaving = added(self._parts, grads), None

    def total(self) -> Packed:
        """Send what has not left yet, and sum all in float32, in one pass."""
        self._take(self.sent())
        return total(self._parts, self._parts[0]).astype(self._parts[0].dtype)

    def _take(self, arrived: Packed | None) -> None:
        if arrived is not None:
            self._parts = added(self._parts, arrived)


def _gradients_of_keys(trip: Trip, found: dict[tuple[int, int], Any], like: Packed) -> Packed:
    """Sum over runs of queries, and round to the dtype of K."""
    sums = [
        [total([g[p] for (_, j), g in found.items() if j == run], like[0]) for p in (1, 2)]
        for run in trip.runs
    ]
    return jnp.stack([x.astype(like.dtype) for pair in sums for x in pair])


def _packed(keys: Keys, room: int = 0) -> Packed:
    parts = [x for pair in keys for x in pair]
    return jnp.stack(parts) if len(parts) > 2 else as_one(*parts, room=room)


def _unpacked(packed: Packed, length: int | None = None) -> Keys:
    return [
        (packed[i, :, :length], packed[i + 1, :, :length]) for i in range(0, packed.shape[0], 2)
    ]
