"""Run a ring of more ranks than there are devices: how long would one of its devices take?

Each device does the work of one rank: its shard of the tokens, every hop, and every transfer, which
goes to the next device. Sizes, kernels and bytes are those of the whole ring. So is the time, where
a device reaches each other device at the same rate. The numbers are not those of an attention: the
same few blocks come round again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from maxattn.context_parallel.base import CONTEXT
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.hops import RingPass
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.errors import InputError
from maxattn.jax_private.mesh import auto_mesh, shard_map
from maxattn.kernels.base import Inputs, Kernel, Result, Rows
from maxattn.kernels.kv_block import Packed, pack
from maxattn.plan import plan
from maxattn.target import Target
from maxattn.tools.bench.jobs import config_of
from maxattn.tools.bench.row import BOTH, FORWARD, BenchJob, BenchRow
from maxattn.tools.model_shapes import Shape

SHARDED, WHOLE = PartitionSpec(None, CONTEXT), PartitionSpec()


def ring_jobs(
    shape: Shape, kernel: str, ring_size: int, devices: int, whole: tuple[Array, ...]
) -> list[BenchJob]:
    """Return a ring on fewer devices, and the same without its transfers.

    Args:
        shape: of the whole attention; one that `check` lets pass.
        kernel: that runs in every hop.
        ring_size: how many ranks the ring has.
        devices: how many of them run.
        whole: (q, k, v, dout) of the shape.
    """
    config = config_of(kernel, "context_parallel=ring")
    made = plan(shape.call(), config, {CONTEXT: ring_size}, Target.here()).kernel
    mesh = auto_mesh(np.asarray(jax.devices()[:devices]), (CONTEXT,))
    tokens = shape.q_len // ring_size
    put = partial(jax.device_put, device=NamedSharding(mesh, SHARDED))
    shards = tuple(put(x[:, : tokens * devices]) for x in whole)
    setup = _RingSetup(shape, mesh, RingOnFewerDevices(ring_size, made), shards)
    who = f"ring of {ring_size} on {devices} devices"
    others = _blocks_of_others(setup, whole, tokens)
    return _jobs(setup, who, ()) + _jobs(setup, f"{who}, no transfer", others)


def check(shape: Shape, ring_size: int) -> None:
    """Refuse a shape whose ring cannot run on fewer devices.

    Raises:
        InputError: it has a mask, or its length does not divide.
    """
    if not shape.mask.is_full or shape.q_len != shape.kv_len:
        rule = "a ring runs on fewer devices where every query sees every key"
        raise InputError("--ring-on", shape.name, rule, "choose a self-attention without a mask")
    if shape.q_len % ring_size:
        rule = f"{shape.q_len} tokens do not divide over {ring_size} ranks"
        raise InputError("--ring-on", shape.name, rule, "choose a length that does")


class _RingSetup(NamedTuple):
    """Hold what the jobs of one shape share.

    Args:
        shape: of the whole attention.
        mesh: of the devices that run.
        ring: what each of them computes.
        shards: (q, k, v, dout) of the ranks that run.
    """

    shape: Shape
    mesh: Mesh
    ring: RingOnFewerDevices
    shards: tuple[Array, ...]


def _blocks_of_others(
    setup: _RingSetup, whole: tuple[Array, ...], tokens: int
) -> tuple[Packed, ...]:
    """Return K and V of every rank but the first, on every device."""
    runs = (slice(i * tokens, (i + 1) * tokens) for i in range(1, setup.ring.ring_size))
    blocks = [pack(*(x[:, run] for x in whole[1:3])) for run in runs]
    return tuple(jax.device_put(x, NamedSharding(setup.mesh, WHOLE)) for x in blocks)


def _jobs(setup: _RingSetup, who: str, others: tuple[Packed, ...]) -> list[BenchJob]:
    ring = setup.ring
    return [
        _job(
            setup,
            BenchRow(setup.shape.name, who, FORWARD),
            ring.forward,
            (others, *setup.shards[:3]),
        ),
        _job(setup, BenchRow(setup.shape.name, who, BOTH), ring.both, (others, *setup.shards)),
    ]


def _job(
    setup: _RingSetup, row: BenchRow, f: Callable[..., Any], inputs: tuple[Any, ...]
) -> BenchJob:
    specs = (tuple(WHOLE for _ in inputs[0]), *(SHARDED for _ in inputs[1:]))
    results = SHARDED if row.what == FORWARD else (SHARDED,) * 4
    mapped = shard_map(f, setup.mesh, specs, results, {CONTEXT})
    return BenchJob(row, setup.shape, mapped, lambda: [inputs], judged=False)


class NextDevice(RingPass):
    """Send to the next device that runs, whatever its rank."""

    def moves(self, ranks: int) -> list[tuple[int, int]]:
        """List (from, to) of every device."""
        there = jax.lax.axis_size(CONTEXT)
        return [(i, (i + 1) % there) for i in range(there)]


class NoTransfer(RingPass):
    """Send nothing: every block of keys is here already, and gradients stay."""

    def __init__(self, others: tuple[Packed, ...], *made_of: Any) -> None:
        super().__init__(*made_of)
        self.others = others

    def send_on(self, hop: int, keys: Any) -> Any:
        """Return the block of the next hop."""
        return keys if hop == self.hops[-1] else self.others[hop]

    def sent(self, arrays: Any, ranks: int) -> Any:
        """Return the arrays."""
        return arrays


@dataclass(frozen=True)
class RingOnFewerDevices:
    """Compute what one device of a ring does, inside `shard_map`.

    Args:
        ring_size: how many ranks the ring has.
        kernel: that computes.
    """

    ring_size: int
    kernel: Kernel

    def forward(self, others: tuple[Packed, ...], q: Array, k: Array, v: Array) -> Array:
        """Return an array in the shape of the output.

        Args:
            others: the blocks of keys of all other ranks, where nothing is sent; else none.
            q, k, v: this device's shards.
        """
        return self._forward(others, Inputs(q, k, v)).out

    def both(
        self, others: tuple[Packed, ...], q: Array, k: Array, v: Array, dout: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return arrays in the shapes of the output and the gradients."""
        inputs = Inputs(q, k, v)
        out, lse = self._forward(others, inputs)
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        ring_pass = self._ring_pass(others, inputs)
        dq, dk, dv, _ = GpuSchedule().backward(ring_pass, self.kernel, inputs, rows)
        return out, dq, dk, dv

    def _forward(self, others: tuple[Packed, ...], inputs: Inputs) -> Result:
        return GpuSchedule().forward(self._ring_pass(others, inputs), self.kernel, inputs)

    def _ring_pass(self, others: tuple[Packed, ...], inputs: Inputs) -> RingPass:
        made_of = ChunkLayout(self.ring_size, 1), 1, inputs
        return NoTransfer(others, *made_of) if others else NextDevice(*made_of)
