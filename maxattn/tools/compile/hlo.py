"""A compiled program's HLO as values: its instructions and collectives.

`compiled.as_text()` of a scheduled program lists the instructions of a computation in the order in
which they start. Instructions between a `-start` and its `-done` overlap the transfer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from maxattn.kernels.table import custom_calls

# HLO's name of a collective, and jax's name, which plans use.
KINDS = {
    "collective-permute": "ppermute",
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "ragged_all_to_all",
    "collective-broadcast": "pbroadcast",
}
# Custom calls that compute, besides kernels; other custom calls describe memory or indices.
COMPUTING_CALLS = ("__cublas", "triton")
PRODUCTS = ("dot", "convolution")
Groups = tuple[tuple[int, ...], ...]
_HEADING = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)")


@dataclass(frozen=True)
class Transfer:
    """One collective of a compiled program."""

    kind: str  # jax's name: "ppermute", "all_gather", "psum", "psum_scatter", "all_to_all", ...
    # (from, to) pairs of a ppermute, else the groups of devices, numbered in the mesh's order
    groups: Groups
    # bytes that one device receives in one run, without its own part; for a psum, the size of the
    # result
    bytes: int
    # start, done: line numbers in the text; equal if the collective is synchronous
    start: int
    done: int
    times: int  # how often the collective runs, by the known trip counts of the loops around it
    # names of kernels and products (dot, convolution, or a loop or fusion with one) between start
    # and done
    kernels: tuple[str, ...]
    op_name: str  # jax's name of the operation

    @property
    def is_async(self) -> bool:
        """Whether the collective has separate start and done instructions."""
        return self.done > self.start

    @property
    def is_overlapped(self) -> bool:
        """Whether a kernel or a product runs during the transfer."""
        return bool(self.kernels)


def transfers(text: str) -> tuple[Transfer, ...]:
    """List the collectives of a compiled program, in the order of its text."""
    program = HloProgram.read(text)
    # A wrapper's collective is listed where `async-start` calls it.
    names = (name for name in program.computations if name not in program.wrappers)
    found = [t for name in names for t in _of_computation(program, name)]
    return tuple(sorted(found, key=lambda t: t.start))


def axes_of(transfer: Transfer, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Name the axes that a collective runs over, of all axes (`sizes`), outermost first."""
    found, stride = [], prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        if any(len({n // stride % size for n in group}) > 1 for group in transfer.groups):
            found.append(axis)
    return tuple(found)


def _of_computation(program: HloProgram, name: str) -> Iterator[Transfer]:
    body = program.computations[name]
    ends = ((i, one) for i, one in enumerate(body) if one.opcode.endswith("-done"))
    done = {start: i for i, one in ends for start in one.operands}
    for place, instruction in enumerate(body):
        found = program.collective(instruction)
        if found is not None:
            end = done.get(instruction.name, place)
            yield _transfer(program, name, found, body[place : end + 1])


def _transfer(
    program: HloProgram, computation: str, found: Instruction, span: Sequence[Instruction]
) -> Transfer:
    """Describe a collective; the last instruction of `span` has the received array's type."""
    opcode, groups = found.opcode.removesuffix("-start"), groups_of(found, program.devices)
    ways, size = max(map(len, groups), default=1), bytes_of(span[-1].type)
    if opcode in ("all-gather", "all-to-all", "ragged-all-to-all"):
        size = size * (ways - 1) // ways
    elif opcode == "reduce-scatter":
        size *= ways - 1
    between, start, done = span[1:-1], span[0], span[-1]
    names = (i.attribute(r'op_name="([^"]*)"') for i in (start, found, done))
    return Transfer(
        kind=KINDS[opcode],
        groups=groups,
        bytes=size,
        start=start.line,
        done=done.line,
        times=program.times(computation),
        kernels=tuple(i.name for i in between if program.computes(i)),
        op_name=next(filter(None, names), ""),
    )


# ---- the text as values --------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """An instruction, `%name = type opcode(rest`, and its line of the text, from 1."""

    name: str
    opcode: str
    type: str
    rest: str
    line: int

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that this one reads."""
        return tuple(re.findall(r"%([\w.\-]+)", self.rest[: self._closing]))

    @cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this one calls: fusions, loops, branches."""
        after = self.rest[self._closing :]
        listed = re.findall(
            r"(?:calls|to_apply|body|condition|\w+_computation)=%?([\w.\-]+)", after
        )
        branches = re.findall(r"branch_computations=\{([^}]*)\}", after)
        return (*listed, *(name for b in branches for name in re.findall(r"%?([\w.\-]+)", b)))

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern's match after the operands, or ""."""
        found = re.search(pattern, self.rest[self._closing :])
        return found.group(1) if found else ""

    @cached_property
    def _closing(self) -> int:
        depth = 1
        for index, character in enumerate(self.rest):
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return index
        return len(self.rest)


@dataclass(frozen=True)
class HloProgram:
    """The instructions of each computation, and the number of devices of the program."""

    computations: dict[str, list[Instruction]]
    devices: int = 1

    @staticmethod
    def read(text: str) -> HloProgram:
        """Parse the text of `compiled.as_text()`."""
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
        """Names of the computations that an `async-start` calls for its collective."""
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
        """Check whether an instruction is a kernel or a product, or calls one."""
        if instruction.opcode == "custom-call":
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            return target.startswith((*COMPUTING_CALLS, *custom_calls()))
        return instruction.opcode in PRODUCTS or any(map(self.computes, self.inside(instruction)))

    def times(self, computation: str) -> int:
        """Multiply the known trip counts of the loops around a computation."""
        for name, body in self.computations.items():
            for i in body:
                if computation in i.called and i.opcode != "async-start":
                    count = i.attribute(r'"known_trip_count":\{"n":"(\d+)"')
                    trips = int(count or 1) if i.opcode == "while" else 1
                    return trips * self.times(name)
        return 1


# ---- types and groups ----------------------------------------------------------------------------

_ITEM_BITS = {"pred": 8, "c64": 64, "c128": 128}
_LISTED = r"=\{((?:\{[\d,]*\},?)*)\}"
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_OF_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


def bytes_of(type_: str) -> int:
    """Count the bytes of an array type, or of a tuple of array types."""
    bits = 0
    for kind, dims in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", type_):
        width = _ITEM_BITS.get(kind) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
        bits += width * prod(_numbers(dims))
    return bits // 8


def groups_of(collective: Instruction, devices: int) -> Groups:
    """Return the (from, to) pairs of a permute, or the groups of devices of another collective.

    HLO writes groups as a list, as a reshaped and transposed iota such as [2,4]<=[4,2]T(1,0), or as
    a mesh ('data'=1,'fsdp'=2,'context'=2) and axes ('context'). No groups mean all devices.
    """
    if collective.opcode.removesuffix("-start") == "collective-permute":
        return _braced(collective.attribute(f"source_target_pairs{_LISTED}"))
    if of_mesh := _OF_MESH.search(collective.rest):
        mesh, axes = of_mesh.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
        along = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", axes)]
        across = [axis for axis in range(len(sizes)) if axis not in along]
        shape = tuple(sizes.values())
        ids = np.arange(prod(shape)).reshape(shape).transpose(*across, *along)
        return _rows(ids.reshape(-1, prod(shape[axis] for axis in along)))
    if listed := collective.attribute(f"replica_groups{_LISTED}"):
        return _braced(listed)
    if counted := _COUNTED.search(collective.rest):
        shape, count, order = (_numbers(part or "") for part in counted.groups())
        ids = np.arange(prod(count)).reshape(count).transpose(order or None)
        return _rows(ids.reshape(shape))
    return (tuple(range(devices)),)


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def _braced(text: str) -> Groups:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
