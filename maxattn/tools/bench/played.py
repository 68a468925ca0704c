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

from maxattn.context_parallel.all_gather import CONTEXT
from maxattn.context_parallel.ring import gpu
from maxattn.context_parallel.ring.hops import Trip
from maxattn.context_parallel.ring.zigzag import Layout
from maxattn.errors import InputError
from maxattn.jax_private.mesh import auto_mesh, shard_map
from maxattn.kernels.base import Kernel, Rows
from maxattn.kernels.dq_accumulator import shares_of
from maxattn.kernels.kv_block import Packed, as_one
from maxattn.masks import Full
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
    q, k = ((x.shape[0], tokens, *x.shape[2:]) for x in whole[:2])
    room = shares_of(made, q, k, places).along
    blocks = [
        as_one(*(x[:, i * tokens : (i + 1) * tokens] for x in whole[1:3]), room=room)
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


class Exchanging(Trip):
    """Send to the next device there is, whatever place that plays."""

    def moves(self, places: int) -> list[tuple[int, int]]:
        """List (from, to) of every device."""
        there = jax.lax.axis_size(CONTEXT)
        return [(i, (i + 1) % there) for i in range(there)]


class Mute(Trip):
    """Send nothing: the blocks that would come are here, and gradients stay."""

    def __init__(self, others: tuple[Packed, ...], *made_of: Any) -> None:
        super().__init__(*made_of)
        self.others = others

    def send_on(self, hop: int, keys: Any) -> Any:
        """Return the block of the next hop."""
        return keys if hop == self.made[-1] else self.others[hop]

    def sent(self, arrays: Any, places: int) -> Any:
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
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        dq, dk, dv, _ = gpu.backward(self._trip(others, q, k), self.kernel, q, k, v, rows)
        return out, dq, dk, dv

    def _forward(
        self, others: tuple[Packed, ...], q: Array, k: Array, v: Array
    ) -> tuple[Array, Array]:
        return gpu.forward(self._trip(others, q, k), self.kernel, q, k, v)

    def _trip(self, others: tuple[Packed, ...], q: Array, k: Array) -> Trip:
        made_of = Layout(self.places, 1), 1, q, k, Full(), None
        return Mute(others, *made_of) if others else Exchanging(*made_of)
