"""What the costs of all strategies are added up from: a sum, bytes of a device's arrays, pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maxattn.call import Call
from maxattn.context_parallel.base import Strategy, itemsize, readable
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.context_parallel.ring.zigzag_pays import FLOPS_A_PAIR, TRAINING
from maxattn.devices import Machine
from maxattn.masks.blocks import count
from maxattn.sharding import ways

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class StrategyCost:
    """Hold what a strategy costs a step.

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
        # Four digits of the whole: fewer would not show why one is within 2% of another.
        step, compute = (f"{seconds * 1e3:.4g}" for seconds in (self.step, self.compute))
        parts = f"{compute} computing + {self.exposed * 1e3:.3g} waiting"
        return f"{self.name}: {step} ms a step = {parts}, holds {readable(self.memory)} more"


def in_ms(seconds: float) -> str:
    """Write seconds as milliseconds, with the three digits that this arithmetic is worth."""
    value = float(f"{seconds * 1e3:.3g}")
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


@dataclass(frozen=True)
class DeviceSizes:
    """Hold what one device has.

    Args:
        q: bytes of q in its own dtype.
        kv: bytes of k and v together, likewise.
        item: bytes of an element of them.
        pair: seconds that a (query, key) takes, forward and backward, all heads and batch rows.
    """

    q: float
    kv: float
    item: int
    pair: float

    @staticmethod
    def of(strategy: Strategy, call: Call, machine: Machine) -> DeviceSizes:
        """Count for a global call, padded for the strategy."""
        shape, item = strategy.shape, itemsize(call.dtype)
        batch, tensor, n = -(-call.batch // ways("B", shape)), ways("N", shape), ways("T", shape)
        # The mean of H and V: a pair costs products over both.
        unit = batch * (call.head_dim + call.value_dim) / (2 * tensor)
        pair = TRAINING * FLOPS_A_PAIR * unit * call.heads / machine.flops
        q = unit * call.q_len / n * call.heads * item
        kv = unit * (2 * call.kv_len) / n * call.kv_heads * item
        return DeviceSizes(q, kv, item, pair)


def pairs(layout: ChunkLayout, call: Call) -> np.ndarray:
    """Return the allowed pairs of the slowest rank for each hop."""
    if call.mask.is_full:
        return np.full(layout.ring_size, call.q_len * call.kv_len / layout.ring_size**2)
    return layout.slowest(call.mask, call.q_len, call.kv_len)[0]


def most_pairs(ranks: int, call: Call) -> float:
    """Return the allowed pairs of the rank whose queries see most, of all keys."""
    if call.mask.is_full:
        return call.q_len * call.kv_len / ranks
    return float(count(call.mask, call.q_len // ranks, call.kv_len, call.q_len, call.kv_len).max())
