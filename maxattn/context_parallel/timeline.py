"""When the kernels and the transfers of a strategy end, in seconds of a training step.

Zig-zag or not, one way or both ways, and `context_parallel: auto` all compare `Timeline.end`.
Where every query sees every key a hop's kernel takes what the shipped estimates say, if they know
it; else the pairs of the slowest rank at the target's rate. A transfer takes its bytes at the rate
of a link.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from maxattn.block_sizes.estimated.choose import estimated_sizes, how_estimated
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import bias_letters, itemsize, kv_bytes
from maxattn.devices import START, Machine, machine_of
from maxattn.target import Target

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

FLOAT = 4
"""Bytes of a float32."""
# Forward: S = q k^T and P v, 2 H each. Backward: five products, with S again.
FLOPS_A_PAIR = 4
TRAINING = 3.5


class Share(NamedTuple):
    """What one device holds and computes.

    Args:
        q: bytes of its queries.
        kv: bytes of its keys and values.
        item: bytes of an element of them.
        pair: seconds of a (query, key) of all its heads and batch rows, forward and backward.
    """

    q: float
    kv: float
    item: int
    pair: float

    @staticmethod
    def of(local: Call, machine: Machine) -> Share:
        """Count for the call of one device; a pair costs products over both H and V."""
        item, dim = itemsize(local.dtype), (local.head_dim + local.value_dim) / 2
        rows = local.batch * local.heads * dim
        pair = TRAINING * FLOPS_A_PAIR * rows / machine.flops
        return Share(rows * local.q_len * item, kv_bytes(local, item), item, pair)


class Traffic(NamedTuple):
    """What a ring's schedule sends and keeps.

    Args:
        grad_item: bytes of an element of dK and dV on their way.
        goes_straight: whether a transfer reaches any rank in one hop, and gradients go home in one.
        halves_local: whether half of the local block is computed beside the last transfer.
        held: bytes beside q, k, v, out and their gradients.
        merged: bytes of merges and sums of partial results.
    """

    grad_item: int
    goes_straight: bool
    halves_local: bool
    held: float
    merged: float


class HopSteps(NamedTuple):
    """Seconds of the kernels of one pass, and of the transfers beside each."""

    compute: np.ndarray
    transfer: np.ndarray

    @property
    def exposed(self) -> float:
        """Seconds of transfers that no kernel covers."""
        return float(np.maximum(self.transfer - self.compute, 0).sum())


class Timeline(NamedTuple):
    """Seconds of a ring's training step, on the slowest rank.

    Args:
        forward, backward: hop by hop.
        mean: of all kernels, if every rank had the same work.
        starts: of transfers.
        slowed: that transfers take from the kernels beside them.
        permutes: to zig-zag order and back.
        exchanges: of heads, in groups of devices.
        merges: of partial results.
        source: of the kernels' times.
        held: bytes beside q, k, v, out and their gradients.
    """

    forward: HopSteps
    backward: HopSteps
    mean: float
    starts: float = 0.0
    slowed: float = 0.0
    permutes: float = 0.0
    exchanges: float = 0.0
    merges: float = 0.0
    source: str = ""
    held: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of the kernels."""
        return float(self.forward.compute.sum() + self.backward.compute.sum())

    @property
    def exposed(self) -> float:
        """Seconds of hops that no kernel covers."""
        return self.forward.exposed + self.backward.exposed + self.starts

    @property
    def waits(self) -> float:
        """Seconds of all that is no kernel."""
        return self.exposed + self.slowed + self.permutes + self.exchanges + self.merges

    @property
    def end(self) -> float:
        """Seconds of the step."""
        return self.compute + self.waits


def timeline_of(
    ring: Ring, call: Call, target: Target, config: AttentionConfig | None = None
) -> Timeline:
    """Return the timeline of a ring.

    Args:
        ring: its layout, its schedule and its groups of devices.
        call: global, not yet padded.
        target: whose rates count.
        config: names the kernel whose shipped estimates count; None: no estimate does.
    """
    machine, n, padded = machine_of(target), ring.ring_size, ring.padded_call(call)
    if call.mask.is_full:  # what padding adds is priced too
        padded = padded.derived(mask=call.mask)
    hop = ring.rank_call(padded).derived(bias=call.bias)
    share, hops = Share.of(hop, machine), ring.hops(padded.mask, padded.q_len, padded.kv_len)
    pairs, total = ring.layout.slowest(padded.mask, padded.q_len, padded.kv_len)
    work, source = pairs[list(hops)] * share.pair, "kernels by arithmetic"
    forward, backward = work / TRAINING, work * (TRAINING - 1) / TRAINING
    if config is not None and (found := _estimated(hop.derived(bias=None), config, target)):
        forward, backward = (np.full(len(hops), seconds) for seconds in found)
        source = how_estimated()

    traffic = ring.schedule.traffic(len(hops), share, hop)
    # Ranks between a hop and the next one that is made; home comes after the last.
    ranks = np.diff([*hops, n])
    links = np.ones(len(hops)) if traffic.goes_straight else np.minimum(ranks, n - ranks)
    keys = share.kv / machine.neighbour / ring.schedule.directions * links
    grads = keys * traffic.grad_item / share.item
    keys[-1] = 0
    if traffic.goes_straight:
        grads[0] = 0  # the local block's are home
    last = backward[0] / 2 if traffic.halves_local else 0.0
    steps = (
        HopSteps(forward, keys),
        HopSteps(
            np.array([backward[0] - last, *backward[1:], last]),
            np.array([keys[0], *(keys[1:] + grads[:-1]), grads[-1]]),
        ),
    )
    exchanges, exchanged = 0.0, 0.0
    if (group := ring.group) > 1:
        # Fifteen arrays: five forward, seven and three backward; statistics are small. Held are q,
        # k, v, out and dout of a backward, and gradients before they go back.
        received = (6 * share.q + 3 * share.kv) * (group - 1) / group
        exchanges = received / machine.exchanged(group) + 15 * START
        exchanged = 4 * share.q + 2 * share.kv
    # K and V forward, K and V and their gradients backward; packed, they have kernels to start.
    starts = 6 * len(hops) - 4 if len(hops) > 1 else 0
    return Timeline(
        *steps,
        mean=total / n * share.pair,
        starts=ring.schedule.directions * starts * START,
        slowed=machine.slowed * float(sum(step.transfer.sum() for step in steps)),
        permutes=_permutes(ring, share, call.bias, machine) if ring.chunks_per_rank > 1 else 0.0,
        exchanges=exchanges,
        merges=traffic.merged / machine.hbm if n > 1 else 0.0,
        source=source,
        held=exchanged + (traffic.held if n > 1 else 0.0),
    )


def _permutes(ring: Ring, share: Share, bias: tuple[int, ...] | None, machine: Machine) -> float:
    """Return the seconds to zig-zag and back: six arrays like q and six like k, and a bias.

    Forward: q, k, v, out. Backward: q, k, v, out, dout, dq, dk, dv.
    """
    rows = 3 * FLOAT * prod(bias or ()) / ring.ring_size if "T" in bias_letters(bias) else 0
    rate = machine.permuted(ring.ring_size * ring.group)
    return (6 * share.q + 3 * share.kv + rows) / rate + 4 * START


def _estimated(hop: Call, config: AttentionConfig, target: Target) -> tuple[float, float] | None:
    """Return the seconds of a forward and of a backward, each of the kernel that takes least."""
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
