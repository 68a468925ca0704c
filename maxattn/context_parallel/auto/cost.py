"""What a strategy costs a training step of one attention, by arithmetic.

    step = compute + transfers that nothing covers

Compute is the pairs of the device with most of them (in each hop of a ring), at the target's rate.
The transfers of `all_gather` and Ulysses stand before and after the kernel and are counted whole;
for a ring's see ring_cost.py. Memory is what the strategy holds beside q, k, v, out and their
gradients.
"""

from __future__ import annotations

from maxattn.call import Call
from maxattn.context_parallel.auto.ring_cost import cost_of_ring
from maxattn.context_parallel.auto.sizes import (
    FLOAT,
    DeviceSizes,
    StrategyCost,
    in_ms,
    most_pairs,
)
from maxattn.context_parallel.base import Strategy
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.ulysses import Ulysses
from maxattn.devices import START, Machine
from maxattn.sharding import ways

__all__ = ["StrategyCost", "cost_of", "in_ms"]


def cost_of(strategy: Strategy, call: Call, machine: Machine) -> StrategyCost:
    """Add up what a strategy costs.

    Args:
        strategy: a ring, Ulysses, or one that gathers keys.
        call: global, padded for the strategy.
        machine: the figures.
    """
    ring = strategy.inner if isinstance(strategy, Ulysses) else strategy
    if isinstance(ring, Ring):
        return cost_of_ring(strategy.label(), ring, call, machine)
    return _cost_of_gather(strategy, call, machine)


def _cost_of_gather(strategy: Strategy, call: Call, machine: Machine) -> StrategyCost:
    n, size = ways("T", strategy.shape), DeviceSizes.of(strategy, call, machine)
    compute = most_pairs(n, call) * size.pair
    # K and V gathered twice, the float32 sums of their gradients scattered once: six arrays.
    received = (n - 1) * size.kv * (2 + FLOAT / size.item)
    exposed = received / machine.gathered(n) + 6 * START
    return StrategyCost(strategy.name, compute, exposed, n * size.kv * (1 + FLOAT / size.item))
