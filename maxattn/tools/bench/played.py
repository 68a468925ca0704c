"""Play a ring of more places than there are devices: how long one of its devices would take.

Each device there is does the work of one place: its share of the tokens, every hop, and every
transfer, which it exchanges with its neighbour. Sizes, kernels and bytes are those of the whole
ring, and so is the time, where a device reaches one other as fast as any. The numbers are not those
of an attention: the same few blocks come round again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from maxattn.context_parallel.base import CONTEXT
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.hops import RingPass
from maxattn.context_parallel.ring.zigzag import Layout
from maxattn.errors import InputError
from maxattn.jax_private.mesh import auto_mesh, shard_map
from maxattn.kernels.base import Inputs, Kernel, Rows
from maxattn.kernels.kv_block import Packed, pack
from maxattn.plan import plan
from maxattn.target import Target
from maxattn.tools.bench.measure import BOTH, FORWARD, Job, Row, config_of
from maxattn.tools.model_shapes import Shape

SPEC = PartitionSpec(None, CONTEXT)


def of_played(
    shape: Shape, kernel: str, places: int, devices: int, whole: tuple[Array, ...]
) -> list[Job]:
    """Return a ring played by some of its devices, and the same without its transfers.

    Args:
        shape: of the whole attention; one that `check` lets pass.
        kernel: that runs in every hop.
        places: of the ring.
        devices: that play it.
        whole: (q, k, v, dout) of the shape.
    """
    made = plan(
        shape.call(), config_of(kernel, "context_parallel=ring"), {CONTEXT: places}, Target.here()
    ).kernel
    mesh = auto_mesh(np.asarray(jax.devices()[:devices]), (CONTEXT,))
    tokens = shape.q_len // places
    share = tuple(
        jax.device_put(x[:, : tokens * devices], NamedSharding(mesh, SPEC)) for x in whole
    )
    q, k, v = (x[:, :tokens] for x in whole[:3])
    spare_keys = made.split_keys(Inputs(q, k, v), places).spare_keys
    blocks = [
        pack(*(x[:, i * tokens : (i + 1) * tokens] for x in whole[1:3]), spare_keys=spare_keys)
        for i in range(1, places)
    ]
    others = tuple(jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in blocks)
    who, played, jobs = f"ring of {places}, played by {devices}", Played(places, made), []
    for name, extra in ((who, ()), (f"{who}, nothing sent", others)):
        for what, f, count in ((FORWARD, played.forward, 3), (BOTH, played.both, 4)):
            inputs = (extra, *share[:count])
            specs = (tuple(PartitionSpec() for _ in extra), *(SPEC,) * count)
            mapped = shard_map(f, mesh, specs, SPEC if what == FORWARD else (SPEC,) * 4, {CONTEXT})
            jobs.append(
                Job(
                    Row(shape.name, name, what),
                    shape,
                    mapped,
                    lambda inputs=inputs: [inputs],
                    judged=False,
                )
            )
    return jobs


def check(shape: Shape, places: int) -> None:
    """Refuse a shape that cannot be played.

    Raises:
        InputError: it has a mask, or its length does not divide.
    """
    if not shape.mask.is_full or shape.q_len != shape.kv_len:
        rule = "a ring is played where every query sees every key"
        raise InputError("--played-by", shape.name, rule, "choose a self-attention without a mask")
    if shape.q_len % places:
        rule = f"{shape.q_len} tokens do not divide over {places} places"
        raise InputError("--played-by", shape.name, rule, "choose a length that does")


class Exchanging(RingPass):
    """Send to the next device there is, whatever place that plays."""

    def moves(self, ranks: int) -> list[tuple[int, int]]:
        """List (from, to) of every device."""
        there = jax.lax.axis_size(CONTEXT)
        return [(i, (i + 1) % there) for i in range(there)]


class Mute(RingPass):
    """Send nothing: the blocks that would come are here, and gradients stay."""

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
class Played:
    """Compute what one device of a ring does, inside `shard_map`.

    Args:
        places: of the ring.
        kernel: that computes.
    """

    places: int
    kernel: Kernel

    def forward(self, others: tuple[Packed, ...], q: Array, k: Array, v: Array) -> Array:
        """Return an array in the shape of the output.

        Args:
            others: the blocks of keys of all other places, where nothing is sent; else none.
            q, k, v: this device's shards.
        """
        return self._forward(others, q, k, v)[0]

    def both(
        self, others: tuple[Packed, ...], q: Array, k: Array, v: Array, dout: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return arrays in the shapes of the output and the gradients."""
        out, lse = self._forward(others, q, k, v)
        rows, inputs = Rows(out, lse, dout, jnp.zeros_like(lse)), Inputs(q, k, v)
        dq, dk, dv, _ = GpuSchedule().backward(
            self._ring_pass(others, inputs), self.kernel, inputs, rows
        )
        return out, dq, dk, dv

    def _forward(
        self, others: tuple[Packed, ...], q: Array, k: Array, v: Array
    ) -> tuple[Array, Array]:
        inputs = Inputs(q, k, v)
        return GpuSchedule().forward(self._ring_pass(others, inputs), self.kernel, inputs)

    def _ring_pass(self, others: tuple[Packed, ...], inputs: Inputs) -> RingPass:
        made_of = Layout(self.places, 1), 1, inputs
        return Mute(others, *made_of) if others else Exchanging(*made_of)
