"""Two kernels as one: the first computes the forward, the second the backward.

A backward needs only an output and an LSE, and every kernel's forward defines them alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from maxattn.block_sizes import FORWARD, BlockSizes, Change
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Inputs, Kernel, Lines, Result, Rows
from maxattn.kernels.kv_block import DqAccumulator
from maxattn.target import Target


@dataclass(frozen=True)
class Pair(Kernel):
    """Run the forward of one kernel and the backward of another."""

    needs_an_example: ClassVar[bool] = True
    first: Kernel
    second: Kernel

    @staticmethod
    def of(first: Kernel, second: Kernel) -> Pair:
        """Make a pair of two kernels that were each built for both passes."""
        return Pair(first.for_forward_alone(), second)

    @property
    def name(self) -> str:
        return f"{self.first.name}/{self.second.name}"

    @property
    def is_pallas(self) -> bool:
        return self.first.is_pallas or self.second.is_pallas

    @property
    def blocks(self) -> BlockSizes | None:
        first, second = self.first.blocks, self.second.blocks
        if first is None or second is None:
            return None
        q, kv, compute = (getattr(first, key) for key in FORWARD)
        return replace(second, block_q=q, block_kv=kv, block_kv_compute=compute)

    @property
    def changes(self) -> tuple[Change, ...]:
        forward = (change for change in self.first.changes if change.key in FORWARD)
        backward = (change for change in self.second.changes if change.key not in FORWARD)
        return (*forward, *backward)

    def for_inference(self) -> Kernel:
        return self.first.for_inference()

    def without_dbias(self) -> Pair:
        return Pair(self.first, self.second.without_dbias())

    def forward(self, inputs: Inputs) -> Result:
        return self.first.forward(inputs)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        return self.second.backward(inputs, rows)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        return self.second.accumulator(inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        return self.second.accumulator_line(inputs)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        what = call, config, target
        both = self.first.notes_of("forward", *what), self.second.notes_of("backward", *what)
        return tuple(dict.fromkeys(note for notes in both for note in notes))

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        first, second = (one.microseconds(call, target) for one in (self.first, self.second))
        return (first[0], second[1]) if first and second else None

    def lines(self, call: Call) -> Lines:
        first, second = self.first.lines(call), self.second.lines(call)
        runs = f"forward {first.runs}, backward {second.runs}"
        if isinstance(self.blocks, BlockSizes):  # each kernel has sizes for both passes
            return Lines(runs, str(self.blocks))
        backward = second.backward or second.blocks
        return Lines(runs, first.blocks, backward if backward != first.blocks else "")


def kernels_of(kernel: Kernel) -> tuple[Kernel, Kernel]:
    """Return the kernel of the forward and the kernel of the backward."""
    return (kernel.first, kernel.second) if isinstance(kernel, Pair) else (kernel, kernel)
