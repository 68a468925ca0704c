"""How long the kernels and the transfers of a ring's hops take, and how long a step waits.

Where every query sees every key, a kernel's time is that of the shipped estimates, if they hold for
a hop; else it is the pairs of the slowest rank at the target's rate. A transfer's is its bytes at
the published rate of a link.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple, cast

import numpy as np

from maxattn.block_sizes.estimated.defaults import estimated_sizes, how_estimated
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import itemsize
from maxattn.context_parallel.ring.collectives import kv_bytes
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.context_parallel.ring.zigzag_pays import TRAINING, Ranks, seconds_a_pair
from maxattn.devices import machine_of
from maxattn.sharding import ways
from maxattn.target import Target

ESTIMATED: tuple[KernelKind, ...] = ("tpu_flash", "flash")
"""Kernels that may run where none is named."""
FLOAT = 4  # bytes


class HopTimes(NamedTuple):
    """Hold seconds of a hop.

    Args:
        forward, backward: of the kernels, for each hop that a transfer follows.
        hop: of the transfer of K and V, one way.
        home: of that of dK and dV.
        source: where the kernels' are from.
    """

    forward: np.ndarray
    backward: np.ndarray
    hop: float
    home: float
    source: str

    def waits(self, directions: int) -> float:
        """Return the seconds of a step, forward and backward, in which no kernel runs.

        The last transfer has half of the local block beside it.
        """
        hop, home = self.hop / directions, self.home / directions
        late = np.maximum(hop - self.forward, 0) + np.maximum(hop + home - self.backward, 0)
        return float(late.sum()) + max(home - self.backward[0] / 2, 0.0)


def hop_times(
    ranks: Ranks, layout: ChunkLayout, call: Call, config: AttentionConfig, target: Target
) -> HopTimes:
    """Price the hops of a global call, not yet padded."""
    local, rate = _hop_call(ranks, call), machine_of(target).neighbour
    transfers = kv_bytes(local, itemsize(local.dtype)) / rate, kv_bytes(local, FLOAT) / rate
    if call.mask.is_full and (found := _estimated(local, config, target)) is not None:
        forward, backward = (np.full(ranks.ring_size - 1, seconds.slow) for seconds in found)
        return HopTimes(forward, backward, *transfers, how_estimated())
    work = _pairs(layout, call) * seconds_a_pair(ranks, call, machine_of(target))
    kernels = work / TRAINING, work * (TRAINING - 1) / TRAINING
    return HopTimes(*kernels, *transfers, "kernels by arithmetic")


def _hop_call(ranks: Ranks, call: Call) -> Call:
    """Return what a device computes in a hop."""
    shares, n = ways("N", ranks.shape) * ranks.group, ranks.ring_size
    return call.derived(
        batch=-(-call.batch // ways("B", ranks.shape)),
        q_len=-(-call.q_len // n),
        kv_len=-(-call.kv_len // n),
        heads=call.heads // shares,
        kv_heads=lcm(call.kv_heads, shares) // shares,
        bias=None,
    )


def _estimated(
    local: Call, config: AttentionConfig, target: Target
) -> tuple[Seconds, Seconds] | None:
    """Return the estimates of a forward and of a backward, each of the kernel that takes least."""
    named = config.kernel_for("self")
    names = ESTIMATED if named == "auto" else (cast(KernelKind, named),)
    every = ([estimated_sizes(name, local, target, t) for t in (False, True)] for name in names)
    known = [(forward.seconds, both.backward) for forward, both in every if forward and both]
    found = [(forward, backward) for forward, backward in known if backward]
    if not found:
        return None
    forward, backward = (min(times, key=lambda one: one.slow) for times in zip(*found, strict=True))
    return forward, backward


def _pairs(layout: ChunkLayout, call: Call) -> np.ndarray:
    """Return the pairs of the slowest rank in each hop but the last."""
    n, unit = layout.ring_size, layout.chunks
    q_len, kv_len = (-(-length // unit) * unit for length in (call.q_len, call.kv_len))
    if call.mask.is_full:
        return np.full(n - 1, q_len * kv_len / n**2)
    return layout.slowest(call.mask, q_len, kv_len)[0][:-1]
