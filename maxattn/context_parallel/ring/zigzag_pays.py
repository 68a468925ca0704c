"""Whether a ring uses zig-zag order: the work that it evens out against the permutes that it costs.

Everybody waits in each hop for the device with most to do, so the ring takes, in pairs of a query
and a key,

    sum over hops of max over devices of pairs(device, hop)

counted from the mask, in contiguous order and in zig-zag. The difference, forward and backward, in
seconds at the target's rate, is what zig-zag saves; moving every operand and result there and back,
in seconds at the link's, is what it costs. It is used where it saves more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from maxattn.call import Call
from maxattn.context_parallel.base import bias_letters, itemsize
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.devices import START, Machine, machine_of
from maxattn.masks import KeyLimit, Mask
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target

# Forward: S = q k^T and P v, 2 H each. Backward: five products, with S again.
FLOPS_A_PAIR = 4
TRAINING = 3.5
EVEN = 1.05  # most work of one device, over the mean, at which nothing need be said


@dataclass(frozen=True)
class Balance:
    """Hold the decision.

    Args:
        zigzag: whether a rank holds an early and a late chunk.
        why: one sentence, empty where the work is even as it is.
    """

    zigzag: bool = False
    why: str = ""


CONTIGUOUS = Balance()


class Ranks(NamedTuple):
    """Name the ranks that share the work.

    Args:
        ring_size: ranks of the ring.
        group: neighbouring devices that are one rank, sharing its heads.
        shape: the mesh's axes.
    """

    ring_size: int
    group: int
    shape: MeshShape


class DeviceWork(NamedTuple):
    """Hold the pairs of the slowest devices, in either order, and those of the mean."""

    contiguous: float
    zigzag: float
    mean: float

    @property
    def is_even(self) -> bool:
        """Tell whether contiguous order is even enough."""
        return self.contiguous <= EVEN * self.mean

    def __str__(self) -> str:
        return (
            f"the slowest devices' work is {self.zigzag / self.mean:.2f} of the mean, in contiguous"
            f" order {self.contiguous / self.mean:.2f}"
        )


def balance(ranks: Ranks, call: Call, target: Target) -> Balance:
    """Decide for a global call.

    Args:
        ranks: that share it.
        call: not yet padded.
        target: whose rates count.
    """
    if ranks.ring_size == 1 or call.mask.is_full:
        return CONTIGUOUS
    work = _work(ranks, call)
    if work.is_even:
        return CONTIGUOUS
    machine = machine_of(target)
    pair = seconds_a_pair(ranks, call, machine)
    saved = (work.contiguous - work.zigzag) * pair
    if saved <= 0:
        return Balance(why=f"no zig-zag: with it {work}")
    return _weighed(work, work.contiguous * pair, saved, _cost(ranks, call, machine), machine)


def _weighed(work: DeviceWork, step: float, saved: float, cost: float, machine: Machine) -> Balance:
    """Take zig-zag where it saves more seconds of a step than it costs."""
    pays = saved > cost
    sums = (
        f"of {step * 1e3:.3g} ms a step it saves {saved * 1e3:.3g}, its permutes cost"
        f" {cost * 1e3:.3g}"
    )
    return Balance(pays, f"{'' if pays else 'no '}zig-zag: {work}; {sums} ({machine.source})")


def _work(ranks: Ranks, call: Call) -> DeviceWork:
    unit = 2 * ranks.ring_size * ranks.group
    q_len, kv_len = (-(-n // unit) * unit for n in (call.q_len, call.kv_len))
    mask: Mask = call.mask & KeyLimit(call.kv_len) if kv_len > call.kv_len else call.mask
    layouts = (ChunkLayout(ranks.ring_size, chunks) for chunks in (1, 2))
    (contiguous, total), (zigzag, _) = (each.slowest(mask, q_len, kv_len) for each in layouts)
    return DeviceWork(float(contiguous.sum()), float(zigzag.sum()), total / ranks.ring_size)


def seconds_a_pair(ranks: Ranks, call: Call, machine: Machine) -> float:
    """Return the seconds that a device takes for one (query, key), all its heads and batch rows."""
    heads = call.heads // (ways("N", ranks.shape) * ranks.group)
    batch = -(-call.batch // ways("B", ranks.shape))
    dim = (call.head_dim + call.value_dim) / 2
    return TRAINING * FLOPS_A_PAIR * dim * heads * batch / machine.flops


def _cost(ranks: Ranks, call: Call, machine: Machine) -> float:
    """Return the seconds of the permutes."""
    rate = machine.permuted(ranks.ring_size * ranks.group)
    return _bytes(ranks, call) / rate + 4 * START


def _bytes(ranks: Ranks, call: Call) -> float:
    """Count what a device receives: six arrays like q and six like k, and a bias.

    Forward: q, k, v, out. Backward: q, k, v, out, dout, dq, dk, dv.
    """
    batch, tensor = -(-call.batch // ways("B", ranks.shape)), ways("N", ranks.shape)
    tokens = batch * (6 * call.q_len * call.heads + 6 * call.kv_len * call.kv_heads)
    rows = tokens / (ranks.ring_size * ranks.group * tensor)
    bias = prod(call.bias or ()) / ranks.ring_size if "T" in bias_letters(call.bias) else 0
    dim = (call.head_dim + call.value_dim) / 2
    return rows * dim * itemsize(call.dtype) + 12.0 * bias
