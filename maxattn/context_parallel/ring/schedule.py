"""What the two schedules of a ring have in common: when K, V and their gradients travel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.context_parallel.base import CONTEXT, Collective
from maxattn.context_parallel.ring.hops import RingPass
from maxattn.context_parallel.timeline import Share, Traffic
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.softmax import NEG_INF


class Schedule:
    """Compute a ring's forward and backward; each schedule is a frozen dataclass."""

    @property
    def directions(self) -> int:
        """In how many directions blocks travel at once."""
        return 1

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        """Say how it launches a kernel's backward over all pairs; "" where the kernel does."""
        return ""

    def notes(self) -> tuple[str, ...]:
        """Return what the user of a ring of several ranks should know."""
        return ()

    def collectives(self, hop: Call, sends: int, chunks_per_rank: int) -> tuple[Collective, ...]:
        """Name the hops of K and V, and of their gradients.

        Args:
            hop: the call of one hop.
            sends: hops after the first; at least one.
            chunks_per_rank: each is an array of its own.
        """
        raise NotImplementedError

    def traffic(self, hops: int, share: Share, hop: Call) -> Traffic:
        """Return what is sent and kept.

        Args:
            hops: that are made, the local one among them.
            share: of one device.
            hop: the call of one hop, with the bias of the whole.
        """
        raise NotImplementedError

    def forward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        raise NotImplementedError

    def backward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; those of its K and V are complete."""
        raise NotImplementedError


def hop_collectives(
    sends: int, block: int, home: tuple[int, int], arrays: int
) -> tuple[Collective, ...]:
    """Name the hops of K and V, forward and backward, and of their gradients.

    Args:
        sends: hops after the first.
        block: bytes of K and V of a hop.
        home: hops of dK and dV, and the bytes of each.
        arrays: that travel in each hop.
    """
    hops, grads = home
    made = (
        ("K,V", "forward", sends * block, sends),
        ("K,V", "backward", sends * block, sends),
        ("dK,dV", "backward", hops * grads, hops),
    )
    return tuple(Collective("ppermute", (CONTEXT,), *each, arrays) for each in made)


def zeros(tree: Any) -> Any:
    """Return float32 zeros, in the shapes of arrays or of what describes them."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def nothing_seen(shapes: Result) -> Result:
    """Return the result, float32, of queries that see no key, from its shapes."""
    out, lse = shapes
    return Result(jnp.zeros(out.shape, jnp.float32), jnp.full(lse.shape, NEG_INF, jnp.float32))


def unseen(queries: Array, value_dim: int) -> Result:
    """Return the result of queries [B,T,N,H] that have seen no value [..., V] yet."""
    b, t, n, _ = queries.shape
    return Result(jnp.zeros((b, t, n, value_dim), jnp.float32), jnp.full((b, n, t), NEG_INF))
