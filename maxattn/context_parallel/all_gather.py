"""Strategies in which every device sees all keys: `none` (K and V are whole already) and
`all_gather`.

Queries stay split over the context axis; each device computes its own queries against all keys, at
their global positions. Whoever holds copies of K and V on several devices sums their gradients:
here, and named in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import jax
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import Collective, Specs, itemsize, operand_specs
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, axis_offset, sum_over, ways
from maxattn.target import Target

CONTEXT = "context"


@dataclass(frozen=True)
class WholeKeys:
    """Attend from each device's queries to keys that are whole on every device of the context
    axis.
    """

    name: ClassVar[str] = "none"
    shape: MeshShape

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Take the mesh; there is nothing to choose."""
        return cls(shape)

    @property
    def runs(self) -> int:
        """A device attends with one part of the sequence."""
        return 1

    def unit(self) -> int:
        """Lengths are padded to whole shards."""
        return ways("T", self.shape)

    def over(self, kernel: Kernel, call: Call) -> Self:
        """Return the strategy as it runs a kernel."""
        return self

    def kernel_call(self, call: Call) -> Call:
        """The kernel runs once."""
        return call

    def backward_line(self) -> str:
        """The kernel launches its own."""
        return ""

    def notes(self) -> tuple[str, ...]:
        """There is nothing to add."""
        return ()

    def label(self) -> str:
        """Name the strategy and its devices for `explain`."""
        return f"{self.name} over {ways('T', self.shape)}"

    def supports(self, call: Call) -> Reason | None:
        """Accept every call."""
        return None

    def head_ways(self) -> int:
        """Heads are split over tensor alone."""
        return ways("N", self.shape)

    def kv_letter(self) -> str:
        """Keys are replicated over context."""
        return "."

    def mask_letters(self, letters: str) -> str:
        """The key axis of a mask or bias stays whole, its query axis is split like the queries."""
        return letters.replace("S", ".")

    def specs(self, call: Call) -> Specs:
        """Return the layout of the operands."""
        return operand_specs(call, self.shape, self)

    def local_call(self, call: Call) -> Call:
        """Return the call that the kernel sees: all keys, this device's share of the rest."""
        tensor = ways("N", self.shape)
        return replace(
            call,
            batch=call.batch // ways("B", self.shape),
            q_len=-(-call.q_len // ways("T", self.shape)),
            heads=call.heads // tensor,
            kv_heads=call.kv_heads // tensor,
            bias=None,
        )

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the transfers of K and V and of their gradients."""
        if CONTEXT not in dict(self.shape):
            return ()
        return (
            Collective("psum", (CONTEXT,), "dK,dV", "backward", self._kv_bytes(call, 4), arrays=2),
        )

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        return kernel.forward(self._whole_inputs(inputs))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients, those of K and V summed over the context axis."""
        dq, dk, dv, dbias = kernel.backward(self._whole_inputs(inputs), rows)
        dk, dv = (self._sum(x).astype(inputs.k.dtype) for x in (dk, dv))
        return Grads(dq, dk, dv, dbias)

    def _whole_inputs(self, inputs: Inputs) -> Inputs:
        k, v = self._whole(inputs.k), self._whole(inputs.v)
        return inputs.replace(k=k, v=v, q_offset=self._q_offset(inputs.q))

    def _q_offset(self, q: Array) -> int | Array:
        return axis_offset(CONTEXT, self.shape, q.shape[1])

    def _whole(self, x: Array) -> Array:
        return x

    def _sum(self, x: Array) -> Array:
        return sum_over(x, (CONTEXT,), self.shape)

    def _kv_bytes(self, call: Call, size: int) -> int:
        local = self.local_call(call)
        return 2 * local.batch * local.kv_len * local.kv_heads * local.head_dim * size


@dataclass(frozen=True)
class AllGather(WholeKeys):
    """Gather K and V over the context axis, attend, and scatter the sums of dK and dV back to their
    owners.
    """

    name: ClassVar[str] = "all_gather"

    def kv_letter(self) -> str:
        """Keys are split over context until they are gathered."""
        return "S"

    def _whole(self, x: Array) -> Array:
        return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)

    def _sum(self, x: Array) -> Array:
        return jax.lax.psum_scatter(x, CONTEXT, scatter_dimension=1, tiled=True)

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the transfers of K and V and of their gradients."""
        n = ways("S", self.shape)
        share = self._kv_bytes(call, itemsize(call.dtype)) * (n - 1) // n
        summed = self._kv_bytes(call, 4) * (n - 1) // n
        return (
            Collective("all_gather", (CONTEXT,), "K,V", "forward", share, arrays=2),
            Collective("all_gather", (CONTEXT,), "K,V", "backward", share, arrays=2),
            Collective("psum_scatter", (CONTEXT,), "dK,dV", "backward", summed, arrays=2),
        )
