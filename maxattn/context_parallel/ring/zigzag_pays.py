"""Whether a ring deals the sequence out in zig-zag: the work that this evens out against the
permutes that it costs.

Everybody waits in each hop for the device with most to do, so the ring takes, in pairs of a query
and a key,

    sum over hops of max over devices of pairs(device, hop)

counted from the mask, in contiguous order and in zig-zag. The difference, forward and backward, in
seconds at the target's rate, is what zig-zag saves; moving every operand and result there and back,
in seconds at the link's, is what it costs. It is taken where it saves more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from maxattn.call import Call
from maxattn.context_parallel.base import bias_letters, itemsize
from maxattn.context_parallel.ring.zigzag import Layout
from maxattn.devices import START, machine_of
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
        zigzag: whether a place holds an early and a late chunk.
        why: one sentence, empty where the work is even as it is.
    """

    zigzag: bool = False
    why: str = ""


CONTIGUOUS = Balance()


def balance(places: int, inner: int, call: Call, shape: MeshShape, target: Target) -> Balance:
    """Decide for a global call.

    Args:
        places: places of the ring.
        inner: neighbouring devices that are one place, sharing its heads.
        call: not yet padded.
        shape: the mesh's axes.
        target: whose rates count.
    """
    if places == 1 or call.mask.is_full:
        return CONTIGUOUS
    unit = 2 * places * inner
    q_len, kv_len = (-(-n // unit) * unit for n in (call.q_len, call.kv_len))
    mask: Mask = call.mask & KeyLimit(call.kv_len) if kv_len > call.kv_len else call.mask
    works = [Layout(places, runs).work(mask, q_len, kv_len) for runs in (1, 2)]
    plain, dealt = (slowest(work) for work in works)
    mean = works[0].sum() / places
    if plain <= EVEN * mean:
        return CONTIGUOUS
    machine = machine_of(target)
    heads = call.heads // (ways("N", shape) * inner)
    pair = (
        TRAINING
        * FLOPS_A_PAIR
        * call.head_dim
        * heads
        * -(-call.batch // ways("B", shape))
        / machine.flops
    )
    saved, cost = (
        (plain - dealt) * pair,
        _bytes(call, shape, places, inner) / machine.exchanged(places * inner),
    )
    cost += 4 * START
    even = (
        f"the slowest devices' work is {dealt / mean:.2f} of the mean, in contiguous order"
        f" {plain / mean:.2f}"
    )
    if saved <= 0:
        return Balance(why=f"no zig-zag: with it {even}")
    sums = (
        f"of {plain * pair * 1e3:.3g} ms a step it saves {saved * 1e3:.3g}, its permutes cost"
        f" {cost * 1e3:.3g}"
    )
    return Balance(
        saved > cost, f"{'' if saved > cost else 'no '}zig-zag: {even}; {sums} ({machine.source})"
    )


def slowest(work: np.ndarray) -> float:
    """Add up, over hops, the work of the device that has most of it; `work` is [place, hop,
    ...].
    """
    return float(work.sum(axis=(2, 3)).max(axis=0).sum())


def _bytes(call: Call, shape: MeshShape, places: int, inner: int) -> float:
    """Count what a device receives: q, k, v, out forward; q, k, v, out, dout, dq, dk, dv backward;
    a bias as well.
    """
    batch, tensor = -(-call.batch // ways("B", shape)), ways("N", shape)
    rows = (
        batch
        * (6 * call.q_len * call.heads + 6 * call.kv_len * call.kv_heads)
        / (places * inner * tensor)
    )
    bias = prod(call.bias or ()) / places if "T" in bias_letters(call.bias) else 0
    return rows * call.head_dim * itemsize(call.dtype) + 12.0 * bias
