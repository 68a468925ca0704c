"""Strategies in which every device sees all keys: `none` and `all_gather`.

Queries stay split over the context axis; each device attends from its own queries, at their global
positions, to all keys. With `none` K and V are whole on every device already. A strategy that holds
copies of K and V on several devices sums their gradients, and names the sum in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import jax
from jaxtyping import Array

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import CONTEXT, Collective, Strategy, itemsize, kv_bytes
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, axis_offset, sum_over, ways
from maxattn.target import Target

AXES = (CONTEXT,)


@dataclass(frozen=True)
class ReplicatedKeys(Strategy):
    """Attend from each device's queries to keys that are whole on every device.

    Args:
        shape: the mesh's axes.
    """

    name: ClassVar[str] = "none"
    shape: MeshShape

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Take the mesh; there is nothing to choose."""
        return cls(shape)

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the sum of the gradients of K and V."""
        if CONTEXT not in dict(self.shape):
            return ()
        size = kv_bytes(self.local_call(call), 4)
        return (Collective("psum", AXES, "dK,dV", "backward", size, arrays=2),)

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        return kernel.forward(self._whole_inputs(inputs))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients, those of K and V summed over the context axis."""
        dq, dk, dv, dbias = kernel.backward(self._whole_inputs(inputs), rows)
        dk, dv = (self._sum(x).astype(inputs.k.dtype) for x in (dk, dv))
        return Grads(dq, dk, dv, dbias)

    def _whole_inputs(self, inputs: Inputs) -> Inputs:
        k, v = self._whole(inputs.k), self._whole(inputs.v)
        start = axis_offset(CONTEXT, self.shape, inputs.q.shape[1])
        return inputs.replace(k=k, v=v, q_offset=start)

    def _whole(self, x: Array) -> Array:
        return x

    def _sum(self, x: Array) -> Array:
        return sum_over(x, AXES, self.shape)


@dataclass(frozen=True)
class AllGather(ReplicatedKeys):
    """Gather K and V over the context axis, and scatter the sums of dK and dV to their owners."""

    name: ClassVar[str] = "all_gather"

    def kv_letter(self) -> str:
        return "S"

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the transfers of K and V and of their gradients."""
        n = ways("S", self.shape)
        local = self.local_call(call)
        share, summed = (kv_bytes(local, size) * (n - 1) // n for size in (itemsize(call.dtype), 4))
        return (
            Collective("all_gather", AXES, "K,V", "forward", share, arrays=2),
            Collective("all_gather", AXES, "K,V", "backward", share, arrays=2),
            Collective("psum_scatter", AXES, "dK,dV", "backward", summed, arrays=2),
        )

    def _whole(self, x: Array) -> Array:
        return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)

    def _sum(self, x: Array) -> Array:
        return jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True)
