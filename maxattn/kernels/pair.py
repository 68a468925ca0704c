"""Two kernels as one: the forward of the first, the backward of the second.

Every kernel's backward takes a given output and LSE, so that any can follow any: both are those of
the same softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.call import Call
from maxattn.kernels.base import Grads, Inputs, Kernel, Lines, Result, Rows


@dataclass(frozen=True)
class Pair(Kernel):
    """Run the forward of one kernel and the backward of another.

    Args:
        first: computes the forward.
        second: computes the backward.
    """

    first: Kernel
    second: Kernel

    @property
    def name(self) -> str:
        """Name both."""
        return f"{self.first.name}/{self.second.name}"

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        return self.first.forward(inputs)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, dbias) from a given LSE and output."""
        return self.second.backward(inputs, rows)

    def lines(self, call: Call) -> Lines:
        """Describe both for `explain`."""
        first, second = self.first.lines(call), self.second.lines(call)
        runs = f"forward {first.runs}, backward {second.runs}"
        backward = second.backward or second.blocks
        return Lines(runs, first.blocks, backward if backward != first.blocks else "")
