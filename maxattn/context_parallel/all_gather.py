"""Strategies with all keys on every device: `none` and `all_gather`.

Queries stay split over the context axis; each device attends from its shard of the queries, at
their global positions, to all keys. With `none`, K and V are replicated from the start. Gradients
of replicated K and V are summed over devices.
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
from maxattn.kernels.softmax import gradient_dtype
from maxattn.sharding import MeshShape, axis_offset, sum_over, ways
from maxattn.target import Target

AXES = (CONTEXT,)


@dataclass(frozen=True)
class ReplicatedKeys(Strategy):
    """Attend from each device's queries to replicated keys."""

    name: ClassVar[str] = "none"
    shape: MeshShape

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        return cls(shape)

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        if CONTEXT not in dict(self.shape):
            return ()
        size = kv_bytes(self.local_call(call))
        return (Collective("psum", AXES, "dK,dV", "backward", size, arrays=2),)

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        return kernel.forward(self._whole_inputs(inputs))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        dq, dk, dv, dbias = kernel.backward(self._whole_inputs(inputs), rows)
        dk, dv = (self._sum(x).astype(gradient_dtype(inputs.k)) for x in (dk, dv))
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
    """Gather K and V over the context axis; scatter the sums of dK and dV to their owners."""

    name: ClassVar[str] = "all_gather"

    def kv_letter(self) -> str:
        return "S"

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        n, local = ways("S", self.shape), self.local_call(call)
        sizes = kv_bytes(local, itemsize(call.dtype)), kv_bytes(local)
        share, summed = (size * (n - 1) // n for size in sizes)
        return (
            Collective("all_gather", AXES, "K,V", "forward", share, arrays=2),
            Collective("all_gather", AXES, "K,V", "backward", share, arrays=2),
            Collective("psum_scatter", AXES, "dK,dV", "backward", summed, arrays=2),
        )

    def _whole(self, x: Array) -> Array:
        return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)

    def _sum(self, x: Array) -> Array:
        return jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True)
