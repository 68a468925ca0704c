"""What a ring costs a training step: hops count where they take longer than the work beside them.

On GPUs a hop also counts for the share of the kernel's rate that it takes meanwhile. Merges and
sums count at the rate of the memory. Where the ranks are groups of devices that exchange heads, the
exchanges stand before and after the kernels and are counted whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maxattn.call import Call
from maxattn.context_parallel.auto.sizes import FLOAT, DeviceSizes, StrategyCost, pairs
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.head_halves import may_halve
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.ring.zigzag_pays import TRAINING
from maxattn.devices import START, Machine
from maxattn.kernels import KERNELS, computed_call
from maxattn.kernels.kv_block import MOST_PARTS
from maxattn.sharding import ways


def cost_of_ring(label: str, ring: Ring, call: Call, machine: Machine) -> StrategyCost:
    """Add up what a ring costs.

    Args:
        label: of the strategy that it is, or is the inner one of.
        ring: its groups exchange heads, where they have several devices.
        call: global, padded for the strategy.
        machine: the figures.
    """
    on_gpu = isinstance(ring.schedule, GpuSchedule)
    made = (_GpuCost if on_gpu else _TorusCost)(
        ring, call, DeviceSizes.of(ring, call, machine), machine
    )
    devices = ring.ring_size * ring.group
    name = label.replace(f" over {devices}", "")
    return StrategyCost(name, float(made.work.sum()), made.waits(), made.memory())


@dataclass(frozen=True)
class _RingCost:
    """Add up what the schedules have in common."""

    ring: Ring
    call: Call
    size: DeviceSizes
    machine: Machine

    # ---- what a schedule says --------------------------------------------------------------------

    @property
    def halves_local(self) -> bool:
        """Whether the local block is computed by halves, the second beside the last transfer."""
        raise NotImplementedError

    def home(self, hop: float) -> float:
        """Return the seconds of a hop of gradients, from those of a hop of K and V."""
        raise NotImplementedError

    def held(self) -> float:
        """Count the bytes of blocks of K and V, of their gradients, and of sums."""
        raise NotImplementedError

    def merged(self) -> float:
        """Count the bytes of merging partial outputs, and of summing partial gradients."""
        raise NotImplementedError

    # ---- the sums --------------------------------------------------------------------------------

    @cached_property
    def work(self) -> np.ndarray:
        """The seconds of the slowest device for each hop."""
        most = pairs(self.ring.layout, self.call)
        return most * self.size.pair / self.ring.group

    def waits(self) -> float:
        """Return the seconds that nothing covers."""
        waits = self._exchange_seconds()
        if self.ring.ring_size > 1:
            waits += self._hops() + self.merged() / self.machine.hbm
        if self.ring.chunks_per_rank > 1:
            waits += self._zigzag_seconds()
        return waits

    def memory(self) -> float:
        """Count the bytes beside q, k, v, out and their gradients."""
        return self._exchanged_bytes() + (self.held() if self.ring.ring_size > 1 else 0)

    def _exchange_seconds(self) -> float:
        """Count fifteen arrays: five forward, seven and three backward; statistics are small."""
        group, size = self.ring.group, self.size
        if group == 1:
            return 0.0
        received = (6 * size.q + 3 * size.kv) * (group - 1) / group
        return received / self.machine.exchanged(group) + 15 * START

    def _exchanged_bytes(self) -> float:
        """Count q, k, v, out and dout of the backward, and gradients before they go back."""
        return 4 * self.size.q + 2 * self.size.kv if self.ring.group > 1 else 0.0

    def _zigzag_seconds(self) -> float:
        rate = self.machine.permuted(self.ring.ring_size * self.ring.group)
        return (6 * self.size.q + 3 * self.size.kv) / rate + 4 * START

    def _hops(self) -> float:
        """Return the seconds of hops beyond the work beside them, taken from it, and to start."""
        n, directions = self.ring.ring_size, self.ring.schedule.directions
        hop = self.size.kv / self.machine.neighbour / directions
        home, work = self.home(hop), self.work[:-1]
        forward, backward = work / TRAINING, work * (TRAINING - 1) / TRAINING
        late = np.maximum(hop - forward, 0).sum() + np.maximum(hop + home - backward, 0).sum()
        # The second half of the local block is computed beside the last transfer.
        local = backward[0] / 2 if self.halves_local else 0.0
        last = max(home - local, 0.0)
        beside = self.machine.slowed * (n - 1) * (2 * hop + home)
        return float(late) + last + beside + directions * (6 * n - 4) * START


@dataclass(frozen=True)
class _TorusCost(_RingCost):
    """Gradients travel in float32, and sums are kept in float32."""

    @property
    def halves_local(self) -> bool:
        """Whether the heads of the local block are halved."""
        call, ring = self.call, self.ring
        shares = ways("N", ring.shape) * ring.group
        biased = call.bias is not None
        return may_halve(call.heads // shares, call.kv_heads // shares, call.mask, biased)

    def home(self, hop: float) -> float:
        """Gradients are float32."""
        return hop * FLOAT / self.size.item

    def held(self) -> float:
        """Count two blocks of K and V, or three, and float32 sums, those of the queries too."""
        kv, q, item = self.size.kv, self.size.q, self.size.item
        return (2 + self.halves_local + 2 * FLOAT / item) * kv + 2 * FLOAT / item * q

    def merged(self) -> float:
        """out, dq, dk and dv are read and written in float32, and a part of each is read."""
        item = self.size.item
        each = (2 * FLOAT + item) / item
        return each * (2 * self.size.q + self.size.kv) * self.ring.ring_size


@dataclass(frozen=True)
class _GpuCost(_RingCost):
    """Gradients travel in the dtype of K, and parts are summed in one pass."""

    @property
    def halves_local(self) -> bool:
        """Whether every query sees every key: gpu_full_mask.py."""
        return self.call.mask.is_full and self.call.bias is None

    def home(self, hop: float) -> float:
        """Gradients take as long as K and V."""
        return hop

    def held(self) -> float:
        """Count the local block, the one that is here and the one that comes, and gradients.

        Of these: the local ones, those that are made, leave and came.
        """
        n, kv, q, item = self.ring.ring_size, self.size.kv, self.size.q, self.size.item
        if not self.halves_local:
            parts = min(n, MOST_PARTS)
            return (2 + parts) * kv + parts * q
        came = min(n - 3, MOST_PARTS + FLOAT // item)
        return (4 if n == 2 else 6 + came) * kv + FLOAT / item * q

    def merged(self) -> float:
        """Each part of out, dk and dv is read once, each sum is written.

        K and V are made one array, forward and backward. Where dQ is not kept in one sum, the same
        of dq, and dK and dV of each hop are made one array.
        """
        n, kv, q = self.ring.ring_size, self.size.kv, self.size.q
        both = (n + 1) * (q + kv) + 4 * kv
        return both if self._keeps_dq() else both + (n + 1) * q + 2 * n * kv

    def _keeps_dq(self) -> bool:
        """Tell whether some kernel keeps dQ in one sum: it is chosen after the strategy."""
        return self.halves_local and any(map(self._may_keep_dq, KERNELS))

    def _may_keep_dq(self, name: str) -> bool:
        return KERNELS[name].may_keep_dq(computed_call(name, self.call, "gpu"), "gpu")
