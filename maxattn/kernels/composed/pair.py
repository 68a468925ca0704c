"""Two kernels as one: the forward of the first, the backward of the second.

Every kernel's backward takes a given output and LSE, so that any can follow any: both are those of
the same softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Inputs, Kernel, Lines, Result, Rows
from maxattn.kernels.dq_accumulator import DqAccumulator
from maxattn.kernels.kv_block import KeySplit
from maxattn.target import Target


@dataclass(frozen=True)
class Pair(Kernel):
    """Run the forward of one kernel and the backward of another.

    Args:
        first: computes the forward.
        second: computes the backward.
    """

    needs_an_example: ClassVar[bool] = True
    first: Kernel
    second: Kernel

    @property
    def name(self) -> str:
        """Name both."""
        return f"{self.first.name}/{self.second.name}"

    def for_inference(self) -> Pair:
        """Return the pair of what both run where nothing is differentiated."""
        return Pair(self.first.for_inference(), self.second.for_inference())

    def without_dbias(self) -> Pair:
        """Return the pair whose second leaves the bias's gradient out."""
        return Pair(self.first, self.second.without_dbias())

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T]) of the first."""
        return self.first.forward(inputs)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, dbias) of the second, from a given LSE and output."""
        return self.second.backward(inputs, rows)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Begin a backward of the second over several blocks of keys."""
        return self.second.accumulator(inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Say how the second's accumulator launches."""
        return self.second.accumulator_line(inputs)

    def split_keys(self, inputs: Inputs, blocks: int) -> KeySplit:
        """Say how the second divides keys over launches."""
        return self.second.split_keys(inputs, blocks)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say what there is to know of either."""
        both = self.first.notes(call, config, target), self.second.notes(call, config, target)
        return tuple(dict.fromkeys(note for notes in both for note in notes))

    def lines(self, call: Call) -> Lines:
        """Describe both for `explain`."""
        first, second = self.first.lines(call), self.second.lines(call)
        runs = f"forward {first.runs}, backward {second.runs}"
        backward = second.backward or second.blocks
        return Lines(runs, first.blocks, backward if backward != first.blocks else "")
