"""The text of a compiled program as values: its computations and their instructions.

`compiled.as_text()` of a scheduled program lists the instructions of a computation in the order in
which they start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from maxattn.kernels.table import custom_calls

# HLO's word for a transfer, and jax's, which plans use.
KINDS = {
    "collective-permute": "ppermute",
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-broadcast": "pbroadcast",
}
# Custom calls that compute, beside those of the kernels; others describe memory or indices.
COMPUTING_CALLS = ("__cublas", "triton")
PRODUCTS = ("dot", "convolution")
_HEADING = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")


@dataclass(frozen=True)
class Instruction:
    """Hold one instruction.

    Args:
        name, opcode, type, rest: `%name = type opcode(rest`.
        line: line of the text, from 1.
    """

    name: str
    opcode: str
    type: str
    rest: str
    line: int

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads."""
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: _closing(self.rest)]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls: fusions, loops, branches."""
        after = self.rest[_closing(self.rest) :]
        listed = re.findall(
            r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)", after
        )
        branches = re.findall(r"branch_computations=\{([^}]*)\}", after)
        return (*listed, *(name for b in branches for name in re.findall(r"%?([\w.\-]+)", b)))

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern after the operands, or nothing."""
        found = re.search(pattern, self.rest[_closing(self.rest) :])
        return found.group(1) if found else ""


@dataclass(frozen=True)
class HloProgram:
    """Hold the instructions of each computation, and over how many devices the program is split."""

    computations: dict[str, list[Instruction]]
    devices: int = 1

    @staticmethod
    def read(text: str) -> HloProgram:
        """Read `compiled.as_text()`."""
        computations: dict[str, list[Instruction]] = {}
        body: list[Instruction] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if heading := _HEADING.match(line):
                body = computations.setdefault(heading.group(1), [])
            elif found := _INSTRUCTION.match(line):
                name, type_, opcode, rest = found.groups()
                body.append(Instruction(name, opcode, type_, rest, number))
            elif body and line != "}":  # attributes may hold line breaks
                body[-1] = replace(body[-1], rest=f"{body[-1].rest}\n{line}")
        partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
        return HloProgram(computations, int(partitions.group(1)) if partitions else 1)

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """List the instructions of the computations that an instruction calls."""
        return [i for name in instruction.called for i in self.computations.get(name, ())]

    @cached_property
    def wrappers(self) -> frozenset[str]:
        """Computations that hold the collective of an `async-start`."""
        every = (i for body in self.computations.values() for i in body)
        return frozenset(name for i in every if i.opcode == "async-start" for name in i.called)

    def collective(self, instruction: Instruction) -> Instruction | None:
        """Return the collective that an instruction starts, or that its `async-start` wraps."""
        if instruction.opcode.removesuffix("-start") in KINDS:
            return instruction
        if instruction.opcode != "async-start":
            return None
        return next((i for i in self.inside(instruction) if i.opcode in KINDS), None)

    def computes(self, instruction: Instruction) -> bool:
        """Say whether an instruction is a kernel or a product, or calls a computation with one."""
        if instruction.opcode == "custom-call":
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            return target.startswith((*COMPUTING_CALLS, *custom_calls()))
        if instruction.opcode in PRODUCTS:
            return True
        return any(map(self.computes, self.inside(instruction)))

    def times(self, computation: str) -> int:
        """Multiply the trip counts of the loops around a computation, where the text says them."""
        for name, body in self.computations.items():
            for i in body:
                if computation in i.called and i.opcode != "async-start":
                    return _trips(i) * self.times(name)
        return 1


def _trips(instruction: Instruction) -> int:
    if instruction.opcode != "while":
        return 1
    return int(instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)


def _closing(rest: str) -> int:
    """Return the index of the parenthesis that closes the operands."""
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(rest)
