"""`context_parallel: auto`: the fastest strategy that can run and fits in memory.

    step = compute + exposed transfers

All-gather and Ulysses transfer before and after the kernel, so their transfers are fully exposed;
timeline.py computes a ring's exposed transfers. Every kernel runs at the target's rate
(`Machine.flops`). Memory means the bytes besides q, k, v, out and their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.all_gather import AllGather
from maxattn.context_parallel.base import FLOAT, Strategy, readable
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.timeline import HopSteps, Share, Timeline, timeline_of
from maxattn.context_parallel.ulysses import Ulysses, UlyssesRing
from maxattn.devices import START, machine_of
from maxattn.masks.blocks import count
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target

# If strategies take equally long, the first of them, which is the simplest, runs.
CANDIDATES: Mapping[str, type[Strategy]] = {
    "all_gather": AllGather, "ulysses": Ulysses, "ring": Ring, "ulysses_ring": UlyssesRing,
}  # fmt: skip
EQUAL = 1.02  # steps whose times differ by a smaller share are equally long
SHARE = 0.5  # share of device memory that a strategy may use; the model needs the rest


class StrategyChoice(NamedTuple):
    """The strategy that runs, and why."""

    strategy: Strategy
    # times of this and the next best strategy; "" if the config names a strategy
    arithmetic: str = ""
    # a line for each strategy: its time and memory, or why it cannot run
    sums: tuple[str, ...] = ()
    refused: tuple[Reason, ...] = ()  # why the strategy that the config names cannot run


def choose_strategy(
    call: Call, config: AttentionConfig, shape: MeshShape, target: Target
) -> StrategyChoice:
    """Choose a strategy for an unpadded global call over a mesh with a context axis."""
    machine = machine_of(target)
    limit = SHARE * machine.memory
    built = {name: kind.build(shape, config, call, target) for name, kind in CANDIDATES.items()}
    refused = {name: reason for name, s in built.items() if (reason := s.supports(call))}
    costs = {
        name: cost_of(s, call, target)
        for name, s in built.items()
        # With one group, or groups of one, ulysses_ring is another candidate.
        if name not in refused and not (isinstance(s, UlyssesRing) and 1 in (s.group, s.ring_size))
    }
    name = fastest(costs, limit)
    step, fitting = costs[name].end, {n: c for n, c in costs.items() if c.held <= limit}
    why = ""
    if not fitting:
        why = ", which needs the least memory"
    elif step > min(c.end for c in fitting.values()):
        why = f", the first within {EQUAL - 1:.0%} of the shortest"
    times, others = f"{_in_ms(step)} ms a step", {n: c for n, c in costs.items() if n != name}
    if others := {n: c for n, c in others.items() if n in fitting} or others:
        other = min(others, key=lambda n: others[n].end)
        rank = "shortest" if others[other].end < step else "next best"
        times += f"; {rank} {other} {_in_ms(others[other].end)} ms"
    head = f"context_parallel: auto is {name}{why}"
    over = f", over the limit of {readable(limit)}, half of the memory"
    devices = f" over {ways('S', shape)}"
    lines = (
        _sums(built[n].label().replace(devices, ""), c) + (over if c.held > limit else "")
        for n, c in costs.items()
    )
    sums = f"{head}, by this arithmetic ({machine.source})", *lines, *map(str, refused.values())
    by = "," if why else ""
    return StrategyChoice(built[name], f"{head}{by} by arithmetic: {times}", sums)


def fastest(costs: Mapping[str, Timeline], limit: float) -> str:
    """Return the first that fits, within 2% of the shortest step; if none fits, the smallest."""
    fitting = {name: line for name, line in costs.items() if line.held <= limit}
    if not fitting:
        return min(costs, key=lambda name: costs[name].held)
    shortest = min(line.end for line in fitting.values())
    return next(name for name, line in fitting.items() if line.end <= EQUAL * shortest)


def _in_ms(seconds: float) -> str:
    """Write seconds as milliseconds with three digits, the precision of these estimates."""
    value = float(f"{seconds * 1e3:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _sums(name: str, line: Timeline) -> str:
    # Four digits: fewer would not show whether two times are within 2%.
    step, compute = (f"{seconds * 1e3:.4g}" for seconds in (line.end, line.compute))
    parts = f"{compute} computing + {line.waits * 1e3:.3g} waiting"
    return f"{name}: {step} ms a step = {parts}, needs {readable(line.held)} of extra memory"


def cost_of(strategy: Strategy, call: Call, target: Target) -> Timeline:
    """Estimate the step of an unpadded global call with a ring, Ulysses or all-gather."""
    if isinstance(strategy, Ring):
        return timeline_of(strategy, call, target)
    n, machine, padded = ways("T", strategy.shape), machine_of(target), strategy.padded_call(call)
    local, q_len, kv_len = strategy.local_call(padded), padded.q_len, padded.kv_len
    share = Share.of(local.derived(kv_len=kv_len // n), machine)
    pairs = local.q_len * kv_len
    if not call.mask.is_full:
        pairs = float(count(padded.mask, local.q_len, kv_len, q_len, kv_len).max())
    # K and V are gathered twice, float32 sums of their gradients scattered once: six arrays.
    received = (n - 1) * share.kv * (2 + FLOAT / share.item)
    waits = received / machine.gathered(n) + 6 * START
    held = n * share.kv * (1 + FLOAT / share.item)
    compute = HopSteps(np.array([pairs * share.pair]), np.zeros(1))
    return Timeline(compute, compute._replace(compute=np.zeros(1)), exchanges=waits, held=held)
