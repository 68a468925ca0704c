"""Estimate the kernels and transfers of a strategy's training step, in seconds.

`Timeline.end` decides between zig-zag and contiguous order, between one direction and both, and
between strategies for `context_parallel: auto`. On a TPU, the time of a hop over all pairs comes
from compiler schedules that ship with maxattn, if they include the kernel. Otherwise a hop takes
the FLOPs of the slowest rank at the target's rate. A transfer takes its bytes at the link's rate.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from maxattn.block_sizes.estimated.choose import estimated_sizes, how_estimated
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import FLOAT, bias_letters, itemsize, kv_bytes
from maxattn.devices import START, Machine, machine_of
from maxattn.target import Target

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

# Forward: S = q k^T and P v, 2 H each. Backward: five matmuls, including S again.
FLOPS_A_PAIR = 4
TRAINING = 3.5


class Share(NamedTuple):
    """One device's share of a call."""

    q: float  # bytes of the device's queries
    kv: float  # bytes of the device's keys and values
    item: int  # bytes of an element
    # seconds of one (query, key) pair in all heads and batch rows, forward and backward
    pair: float

    @staticmethod
    def of(local: Call, machine: Machine) -> Share:
        """Compute the share from one device's call; a pair has matmuls over H and over V."""
        item, dim = itemsize(local.dtype), (local.head_dim + local.value_dim) / 2
        rows = local.batch * local.heads * dim
        pair = TRAINING * FLOPS_A_PAIR * rows / machine.flops
        return Share(rows * local.q_len * item, kv_bytes(local, item), item, pair)


class Traffic(NamedTuple):
    """The traffic and memory of a ring's schedule."""

    grad_item: int  # bytes of an element of dK and dV while they travel
    # whether one transfer reaches any rank, so gradients return in one transfer
    goes_straight: bool
    halves_local: bool  # whether half of the local block is computed beside the last transfer
    held: float  # bytes in memory besides q, k, v, out and their gradients
    merged: float  # bytes that merges and sums of partial results read and write


class HopSteps(NamedTuple):
    """Seconds of the kernels of one pass, and of the transfer beside each."""

    compute: np.ndarray
    transfer: np.ndarray

    @property
    def exposed(self) -> float:
        """Exposed seconds: transfers beyond the kernels beside them."""
        return float(np.maximum(self.transfer - self.compute, 0).sum())


class Timeline(NamedTuple):
    """Seconds of a training step, on the slowest rank."""

    # forward, backward: kernels and transfers, hop by hop
    forward: HopSteps
    backward: HopSteps
    mean: float = 0.0  # seconds of all kernels, if every rank had the same work
    starts: float = 0.0  # latencies of transfers
    slowed: float = 0.0  # slowdown of kernels by the transfers beside them
    permutes: float = 0.0  # permutes to zig-zag order and back
    exchanges: float = 0.0  # exchanges of heads within groups of devices, or gathers of keys
    merges: float = 0.0  # merges of partial results
    source: str = ""  # the source of the kernels' times
    held: float = 0.0  # bytes in memory besides q, k, v, out and their gradients

    @property
    def compute(self) -> float:
        """Seconds of the kernels."""
        return float(self.forward.compute.sum() + self.backward.compute.sum())

    @property
    def exposed(self) -> float:
        """Exposed seconds of the hops."""
        return self.forward.exposed + self.backward.exposed + self.starts

    @property
    def waits(self) -> float:
        """Seconds of everything but the kernels."""
        return self.exposed + self.slowed + self.permutes + self.exchanges + self.merges

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return self.compute + self.waits


def timeline_of(
    ring: Ring, call: Call, target: Target, config: AttentionConfig | None = None
) -> Timeline:
    """Return a ring's timeline for an unpadded global call, by schedules, else by FLOPs."""
    machine, n, padded = machine_of(target), ring.ring_size, ring.padded_call(call)
    if call.mask.is_full:  # padded pairs take time too
        padded = padded.derived(mask=call.mask)
    hop = ring.rank_call(padded).derived(bias=call.bias)
    lengths = padded.mask, padded.q_len, padded.kv_len
    share, hops = Share.of(hop, machine), ring.layout.hops(*lengths)
    pairs, total = ring.layout.slowest(*lengths)
    work, source = pairs[list(hops)] * share.pair, "kernels by arithmetic"
    forward, backward = work / TRAINING, work * (TRAINING - 1) / TRAINING
    if config is not None and (found := _scheduled(hop.derived(bias=None), config, target)):
        forward, backward = (np.full(len(hops), seconds) for seconds in found)
        source = how_estimated(target.device_kind)

    traffic = ring.schedule.traffic(len(hops), share, hop)
    # Ranks from each hop to the next; after the last hop, from there back to the keys' owner.
    ranks = np.diff([*hops, n])
    links = np.ones(len(hops)) if traffic.goes_straight else np.minimum(ranks, n - ranks)
    keys = share.kv / machine.neighbour / ring.schedule.directions * links
    grads = keys * traffic.grad_item / share.item
    keys[-1] = 0
    if traffic.goes_straight:
        grads[0] = 0  # gradients of the local block need no transfer
    last = backward[0] / 2 if traffic.halves_local else 0.0
    steps = (
        HopSteps(forward, keys),
        HopSteps(
            np.array([backward[0] - last, *backward[1:], last]),
            np.array([keys[0], *(keys[1:] + grads[:-1]), grads[-1]]),
        ),
    )
    exchanges = exchanged = permutes = 0.0
    if (group := ring.group) > 1:
        # Fifteen arrays: five forward, ten backward; LSEs are small. Memory has q, k, v, out and
        # dout of a backward, and gradients before they return.
        received = (6 * share.q + 3 * share.kv) * (group - 1) / group
        exchanges = received / machine.exchanged(group) + 15 * START
        exchanged = 4 * share.q + 2 * share.kv
    if ring.zigzag:
        # Six arrays like q and six like k, and a bias. Forward: q, k, v, out. Backward: q, k, v,
        # out, dout, dq, dk, dv.
        has_rows = "T" in bias_letters(call.bias)
        bias = 3 * FLOAT * prod(call.bias or ()) / n if has_rows else 0
        permutes = (6 * share.q + 3 * share.kv + bias) / machine.permuted(n * group) + 4 * START
    # K and V forward, K and V and their gradients backward; packing launches kernels.
    starts = 6 * len(hops) - 4 if len(hops) > 1 else 0
    return Timeline(
        *steps,
        mean=total / n * share.pair,
        starts=ring.schedule.directions * starts * START,
        slowed=machine.slowed * float(sum(step.transfer.sum() for step in steps)),
        permutes=permutes,
        exchanges=exchanges,
        merges=traffic.merged / machine.hbm if n > 1 else 0.0,
        source=source,
        held=exchanged + (traffic.held if n > 1 else 0.0),
    )


def _scheduled(hop: Call, config: AttentionConfig, target: Target) -> tuple[float, float] | None:
    """Return the seconds of a forward and a backward by the fastest scheduled kernels, or None."""
    if not hop.mask.is_full:
        return None
    named = config.kernel_for("self")
    names = ("tpu_flash", "flash") if named == "auto" else (cast(KernelKind, named),)
    every = [[estimated_sizes(name, hop, target, t) for t in (False, True)] for name in names]
    known = [(one.seconds, both.backward) for one, both in every if one and both]
    found = [(forward.slow, backward.slow) for forward, backward in known if backward]
    if not found:
        return None
    forward, backward = (min(seconds) for seconds in zip(*found, strict=True))
    return forward, backward
