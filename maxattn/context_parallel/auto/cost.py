"""What a context strategy costs a training step of one attention, by arithmetic over heads,
lengths, link and memory.

    step = compute + transfers that nothing covers

Compute is the pairs of the device with most of them (in each hop of a ring), at the target's rate.
The transfers of `all_gather` and Ulysses stand before and after the kernel and are counted whole; a
ring's hop counts where it takes longer than the work that it runs beside, and on GPUs for the share
of the kernel's rate that it takes meanwhile; its merges and sums count at the rate of the memory.
Memory is what the strategy holds beside q, k, v, out and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maxattn.call import Call
from maxattn.context_parallel.all_gather import WholeKeys
from maxattn.context_parallel.base import itemsize, readable
from maxattn.context_parallel.ring.head_halves import may_halve
from maxattn.context_parallel.ring.ring import Ring
from maxattn.context_parallel.ring.zigzag import Layout
from maxattn.context_parallel.ring.zigzag_pays import FLOPS_A_PAIR, TRAINING
from maxattn.devices import START, Machine
from maxattn.kernels.dq_accumulator import MOST_PARTS
from maxattn.kernels.fa4.backward_steps import HEAD_LIMIT
from maxattn.sharding import ways

FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """Hold one sum.

    Args:
        name: the strategy's label.
        compute: seconds of the slowest device.
        exposed: seconds of transfers and merges that nothing covers.
        memory: bytes on one device.
    """

    name: str
    compute: float
    exposed: float
    memory: float

    @property
    def step(self) -> float:
        """Seconds, forward and backward."""
        return self.compute + self.exposed

    def __str__(self) -> str:
        step, compute, waits = map(in_ms, (self.step, self.compute, self.exposed))
        parts = f"{compute} computing + {waits} waiting"
        return f"{self.name}: {step} ms a step = {parts}, holds {readable(self.memory)} more"


def in_ms(seconds: float) -> str:
    """Write seconds as milliseconds, with the two digits that this arithmetic is worth."""
    value = float(f"{seconds * 1e3:.2g}")
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def cost_of(strategy: WholeKeys, call: Call, machine: Machine) -> Cost:
    """Add up what a strategy costs.

    Args:
        strategy: a ring, Ulysses, or one with whole keys.
        call: global, padded for the strategy.
        machine: the figures.
    """
    return (
        _of_ring(strategy, call, machine)
        if isinstance(strategy, Ring)
        else _of_gather(strategy, call, machine)
    )


@dataclass(frozen=True)
class _Sizes:
    """Bytes, on one device: q in its own dtype, k and v together likewise, and the seconds of a
    pair.
    """

    q: float
    kv: float
    item: int
    pair: float

    @staticmethod
    def of(strategy: WholeKeys, call: Call, machine: Machine) -> _Sizes:
        shape, item = strategy.shape, itemsize(call.dtype)
        batch, tensor, n = -(-call.batch // ways("B", shape)), ways("N", shape), ways("T", shape)
        unit = batch * call.head_dim / tensor
        pair = TRAINING * FLOPS_A_PAIR * unit * call.heads / machine.flops
        q, kv = (
            unit * length / n * heads * item
            for length, heads in ((call.q_len, call.heads), (2 * call.kv_len, call.kv_heads))
        )
        return _Sizes(q, kv, item, pair)


def _work(layout: Layout, call: Call) -> np.ndarray:
    """Count pairs for [place, hop]."""
    if call.mask.is_full:
        return np.full((layout.places,) * 2, call.q_len * call.kv_len / layout.places**2)
    return layout.work(call.mask, call.q_len, call.kv_len).sum(axis=(2, 3))


def _of_gather(strategy: WholeKeys, call: Call, machine: Machine) -> Cost:
    n, size = ways("T", strategy.shape), _Sizes.of(strategy, call, machine)
    compute = float(_work(Layout(n, 1), call).sum(axis=1).max()) * size.pair
    # K and V gathered twice, the float32 sums of their gradients scattered once: six arrays.
    received = (n - 1) * size.kv * (2 + FLOAT / size.item)
    return Cost(
        strategy.name,
        compute,
        received / machine.gather + 6 * START,
        n * size.kv * (1 + FLOAT / size.item),
    )


def _of_ring(ring: Ring, call: Call, machine: Machine) -> Cost:
    size, n = _Sizes.of(ring, call, machine), ring.places * ring.inner
    work = _work(ring.layout, call).max(axis=0) * size.pair / ring.inner
    waits, memory = _exchanges(ring, size, machine)
    if ring.places > 1:
        covered = _covers_last(ring, call)
        # Where FlashAttention-4 runs: the kernel is chosen apart from the strategy.
        in_place = (
            ring.direct and covered and call.heads == call.kv_heads and call.head_dim <= HEAD_LIMIT
        )
        waits += (
            _hops(work, ring, size, machine, covered) + _merges(ring, size, in_place) / machine.hbm
        )
        memory += _held(ring, covered, size)
    if ring.runs > 1:
        waits += (6 * size.q + 3 * size.kv) / machine.exchanged(n) + 4 * START
    return Cost(ring.label().replace(f" over {n}", ""), float(work.sum()), waits, memory)


def _covers_last(ring: Ring, call: Call) -> bool:
    """Tell whether the own keys are computed by halves, the second beside the last gradients on
    their way home.
    """
    if ring.direct:
        return call.mask.is_full and call.bias is None
    shares = ways("N", ring.shape) * ring.inner
    return may_halve(
        call.heads // shares, call.kv_heads // shares, call.mask, call.bias is not None
    )


def _held(ring: Ring, halved: bool, size: _Sizes) -> float:
    """Count what hops hold: blocks of K and V and of their gradients, and sums; the same of the
    queries.
    """
    if not ring.direct:
        return (2 + halved + 2 * FLOAT / size.item) * size.kv + 2 * FLOAT / size.item * size.q
    parts = min(ring.places, MOST_PARTS)
    if not halved:
        return (2 + parts) * size.kv + parts * size.q
    # The own keys, those that are here and those that come; the own gradients, those that are made,
    # leave and came.
    came = min(ring.places - 3, MOST_PARTS + FLOAT // size.item)
    return (4 if ring.places == 2 else 6 + came) * size.kv + FLOAT / size.item * size.q


def _exchanges(ring: Ring, size: _Sizes, machine: Machine) -> tuple[float, float]:
    """Return the seconds and the memory of exchanging heads: q, k, v, out; then those, dout and the
    gradients.
    """
    if ring.inner == 1:
        return 0.0, 0.0
    # Fifteen arrays: five forward, seven and three backward; those of statistics are small.
    received = (6 * size.q + 3 * size.kv) * (ring.inner - 1) / ring.inner
    # What came in for the backward, q, k, v, out and dout, and the gradients before they go back.
    return received / machine.exchanged(ring.inner) + 15 * START, 4 * size.q + 2 * size.kv


def _hops(work: np.ndarray, ring: Ring, size: _Sizes, machine: Machine, covered: bool) -> float:
    """Return the seconds that hops take longer than the work beside them, take from it, and take to
    start.
    """
    hop, item = size.kv / machine.neighbour, size.item
    home = hop if ring.direct else hop * FLOAT / item
    forward, backward = work[:-1] / TRAINING, work[:-1] * (TRAINING - 1) / TRAINING
    late = np.maximum(hop - forward, 0).sum() + np.maximum(hop + home - backward, 0).sum()
    own = (
        backward[0] / 2 if covered else 0.0
    )  # the second half of the own keys is computed beside the last transfer
    last = max(home - own, 0.0)
    beside = machine.slowed * (ring.places - 1) * (2 * hop + home)
    return float(late) + last + beside + (6 * ring.places - 4) * START


def _merges(ring: Ring, size: _Sizes, in_place: bool) -> float:
    """Count the bytes of merging partial outputs, and of summing partial gradients."""
    n, item = ring.places, size.item
    if not ring.direct:
        # out and dq are read and written in float32, dk and dv too, and a part of each is read.
        return (2 * FLOAT + item) / item * (2 * size.q + size.kv) * n
    # Each part of out, dk and dv is read once, each sum is written; K and V are made one array,
    # forward and backward.
    both = (n + 1) * (size.q + size.kv) + 4 * size.kv
    # Where blocks are not computed in place, the same of dq, and dK and dV of each hop are made one
    # array.
    return both if in_place else both + (n + 1) * size.q + 2 * n * size.kv
