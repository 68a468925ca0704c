"""`context_parallel: auto`: the strategy with the shortest step, of those that run and fit.

    step = compute + exposed transfers

The transfers of `all_gather` and Ulysses stand before and after the kernel and are exposed whole;
for a ring's see timeline.py. Kernels count at the target's rate, whatever computes. Memory is what
the strategy holds beside q, k, v, out and their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.all_gather import AllGather
from maxattn.context_parallel.base import Strategy, readable
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.timeline import FLOAT, Share, timeline_of
from maxattn.context_parallel.ulysses import Ulysses, UlyssesRing
from maxattn.devices import START, machine_of
from maxattn.masks.blocks import count
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target

# In the order of preference where two take equally long: fewer moving parts first.
CANDIDATES: Mapping[str, type[Strategy]] = {
    "all_gather": AllGather, "ulysses": Ulysses, "ring": Ring, "ulysses_ring": UlyssesRing,
}  # fmt: skip
EQUAL = 1.02  # times that differ by less are taken as equal
SHARE = 0.5  # of the memory, for what the strategy holds: the model needs the rest


@dataclass(frozen=True)
class StrategyChoice:
    """Hold what was chosen, and the sums it was chosen by.

    Args:
        strategy: the one that runs.
        arithmetic: its time and that of the next best, in a line.
        sums: those of every strategy, a line each, and why others cannot run.
    """

    strategy: Strategy
    arithmetic: str
    sums: tuple[str, ...]


def choose_strategy(
    call: Call, config: AttentionConfig, shape: MeshShape, target: Target
) -> StrategyChoice:
    """Choose a strategy for self-attention over a context axis.

    Args:
        call: global, not yet padded.
        config: its settings for Ulysses.
        shape: the mesh's axes, context among them.
        target: whose figures count.
    """
    machine = machine_of(target)
    limit = SHARE * machine.memory
    built = {name: kind.build(shape, config, call, target) for name, kind in CANDIDATES.items()}
    refused = {name: reason for name, s in built.items() if (reason := s.supports(call))}
    costs = {
        name: cost_of(s, call, target)
        for name, s in built.items() if name not in refused and not _is_another(s)
    }  # fmt: skip
    name = fastest(costs, limit)
    step, fitting = costs[name].step, {n: c for n, c in costs.items() if c.memory <= limit}
    why = ""
    if not fitting:
        why = ", which holds least"
    elif step > min(c.step for c in fitting.values()):
        why = f", the first within {EQUAL - 1:.0%} of the shortest"
    times, others = f"{_in_ms(step)} ms a step", {n: c for n, c in costs.items() if n != name}
    if others := {n: c for n, c in others.items() if n in fitting} or others:
        other = min(others, key=lambda n: others[n].step)
        rank = "shortest" if others[other].step < step else "next best"
        times += f"; {rank} {other} {_in_ms(others[other].step)} ms"
    head = f"context_parallel: auto is {name}{why}"
    over = f", over the {readable(limit)} that half of the memory is"
    lines = (f"{cost}{over if cost.memory > limit else ''}" for cost in costs.values())
    sums = f"{head}, by this arithmetic ({machine.source})", *lines, *map(str, refused.values())
    by = "," if why else ""
    return StrategyChoice(built[name], f"{head}{by} by arithmetic: {times}", sums)


def fastest(costs: Mapping[str, StrategyCost], limit: float) -> str:
    """Return the first name whose step is about the shortest of those within the memory.

    If none is within it, return the one that holds least.
    """
    fitting = {name: cost for name, cost in costs.items() if cost.memory <= limit}
    if not fitting:
        return min(costs, key=lambda name: costs[name].memory)
    shortest = min(cost.step for cost in fitting.values())
    return next(name for name, cost in fitting.items() if cost.step <= EQUAL * shortest)


def _in_ms(seconds: float) -> str:
    """Write seconds as milliseconds, with the three digits that this arithmetic is worth."""
    value = float(f"{seconds * 1e3:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _is_another(strategy: Strategy) -> bool:
    """Tell whether it is another candidate too: one group of devices, or groups of one."""
    ring = strategy.inner if isinstance(strategy, UlyssesRing) else None
    return ring is not None and 1 in (ring.group, ring.ring_size)


# ---- what a strategy costs -----------------------------------------------------------------------


@dataclass(frozen=True)
class StrategyCost:
    """Hold what a strategy costs a training step.

    Args:
        name: the strategy's label.
        compute: seconds of the kernels on the slowest device.
        waits: seconds of transfers and merges that no kernel covers.
        memory: bytes on one device.
    """

    name: str
    compute: float
    waits: float
    memory: float

    @property
    def step(self) -> float:
        """Seconds, forward and backward."""
        return self.compute + self.waits

    def __str__(self) -> str:
        # Four digits of the whole: fewer would not show why one is within 2% of another.
        step, compute = (f"{seconds * 1e3:.4g}" for seconds in (self.step, self.compute))
        parts = f"{compute} computing + {self.waits * 1e3:.3g} waiting"
        return f"{self.name}: {step} ms a step = {parts}, holds {readable(self.memory)} more"


def cost_of(strategy: Strategy, call: Call, target: Target) -> StrategyCost:
    """Add up what a strategy costs a global call, not yet padded.

    Args:
        strategy: a ring, Ulysses, or one that gathers keys.
        call: the call.
        target: whose figures count.
    """
    ring = strategy.inner if isinstance(strategy, Ulysses) else strategy
    if not isinstance(ring, Ring):
        return _cost_of_gather(strategy, call, target)
    line, devices = timeline_of(ring, call, target), ring.ring_size * ring.group
    name = strategy.label().replace(f" over {devices}", "")
    return StrategyCost(name, line.compute, line.waits, line.held)


def _cost_of_gather(strategy: Strategy, call: Call, target: Target) -> StrategyCost:
    n, machine, padded = ways("T", strategy.shape), machine_of(target), strategy.padded_call(call)
    local = strategy.local_call(padded)
    q_len, kv_len = padded.q_len, padded.kv_len
    share = Share.of(local.derived(kv_len=kv_len // n), machine)
    pairs = local.q_len * kv_len
    if not call.mask.is_full:
        pairs = float(count(padded.mask, local.q_len, kv_len, q_len, kv_len).max())
    # K and V gathered twice, the float32 sums of their gradients scattered once: six arrays.
    received = (n - 1) * share.kv * (2 + FLOAT / share.item)
    waits = received / machine.gathered(n) + 6 * START
    held = n * share.kv * (1 + FLOAT / share.item)
    return StrategyCost(strategy.name, pairs * share.pair, waits, held)
