"""What a compiled program sends between devices, read off the text of its HLO. Pure: text in,
values out.

`compiled.as_text()` of a scheduled program lists the instructions of a computation in the order in
which they start, so what stands between a `-start` and its `-done` runs while the data is under
way. It compiles nothing and knows no plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

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
Groups = tuple[tuple[int, ...], ...]


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
class Transfer:
    """Hold one collective of a compiled program.

    Args:
        kind: jax's word: "ppermute", "all_gather", "psum", "psum_scatter", "all_to_all", ...
        name: the instruction's.
        computation: where it stands; the entry, a loop's body, ...
        groups: (from, to) pairs of a ppermute, else the groups of devices; positions in the mesh's
            order.
        bytes: bytes that one device receives, once: what it has afterwards and had not before. Of a
            psum, its size.
        start, done: lines of the text; equal where the program waits for it on the spot.
        times: how often it runs: trip counts of the loops around it, as far as the text says them.
        kernels: kernels and products (dot, convolution, and loops or fusions with one) between
            start and done.
        others: how many other fusions stand between start and done.
        op_name: jax's name of the operation.
    """

    kind: str
    name: str
    computation: str
    groups: Groups
    bytes: int
    start: int
    done: int
    times: int
    kernels: tuple[str, ...]
    others: int
    op_name: str

    @property
    def is_async(self) -> bool:
        """Whether the program starts it and waits for it in two places."""
        return self.done > self.start

    @property
    def is_overlapped(self) -> bool:
        """Whether a kernel or a product runs while the data is under way."""
        return bool(self.kernels)

    @property
    def is_backward(self) -> bool:
        """Whether jax made it for a gradient."""
        return "transpose(" in self.op_name


def transfers(text: str) -> tuple[Transfer, ...]:
    """List the collectives of a compiled program, in the order of the text.

    Args:
        text: `jax.jit(f).lower(...).compile().as_text()`.
    """
    program = _Program.read(text)
    found = [t for name in program.computations for t in _of_computation(program, name)]
    return tuple(sorted(found, key=lambda t: t.start))


def axes_of(transfer: Transfer, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Name the mesh axes that a collective runs over.

    Args:
        transfer: from `transfers`.
        sizes: every axis of the mesh with its size, outermost first, those of one device too
            (`dict(mesh.shape)`).
    """
    moved = {axis for group in transfer.groups for axis in _differing(group, sizes)}
    return tuple(axis for axis in sizes if axis in moved)


def _differing(group: Sequence[int], sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the axes along which the devices of a group lie apart."""
    stride = prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        if len({device // stride % size for device in group}) > 1:
            yield axis


# ---- one computation -----------------------------------------------------------------------------


def _of_computation(program: _Program, name: str) -> Iterator[Transfer]:
    body = program.computations[name]
    if name in program.wrappers:
        return  # `async-start` calls it, and stands for it
    done_at = {
        start: place
        for place, i in enumerate(body)
        if i.opcode.endswith("-done")
        for start in i.operands
    }
    for place, instruction in enumerate(body):
        found = program.collective(instruction)
        if found is None:
            continue
        end = done_at.get(instruction.name, place)
        result = body[end] if end > place else instruction
        yield _transfer(program, name, found, result, body[place : end + 1])


def _transfer(
    program: _Program,
    computation: str,
    found: Instruction,
    result: Instruction,
    span: Sequence[Instruction],
) -> Transfer:
    """Describe a collective.

    Args:
        program: all computations.
        computation: the one that it stands in.
        found: the instruction that says what moves and where to.
        result: the instruction whose type is what arrives.
        span: from start to done.
    """
    opcode = found.opcode.removesuffix("-start")
    # No groups are one of all devices.
    groups = (
        _pairs(found)
        if opcode == "collective-permute"
        else _groups(found) or (tuple(range(program.devices)),)
    )
    between = span[1:-1]
    kernels = tuple(i.name for i in between if program.computes(i))
    others = sum(i.opcode == "fusion" and not program.computes(i) for i in between)
    received = _received(opcode, _size(result.type), max(map(len, groups), default=1))
    op_name = span[0].attribute(r'op_name="([^"]*)"') or found.attribute(r'op_name="([^"]*)"')
    return Transfer(
        KINDS[opcode],
        span[0].name,
        computation,
        groups,
        received,
        span[0].line,
        result.line,
        program.times(computation),
        kernels,
        others,
        op_name or result.attribute(r'op_name="([^"]*)"'),
    )


def _received(opcode: str, result: int, ways: int) -> int:
    if opcode in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result * (ways - 1) // ways
    return result * (ways - 1) if opcode == "reduce-scatter" else result


_ITEM_BITS = {"pred": 8, "c64": 64, "c128": 128}


def _size(type_: str) -> int:
    """Count the bytes of a type or a tuple of them."""
    bits = 0
    for kind, dims in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", type_):
        width = _ITEM_BITS.get(kind) or int(re.sub(r"^[a-z]+(\d+).*", r"\1", kind))
        bits += width * prod(int(n) for n in dims.split(",") if n)
    return bits // 8


def _pairs(instruction: Instruction) -> Groups:
    return _braced(instruction.attribute(r"source_target_pairs=\{((?:\{[\d,]*\},?)*)\}"))


def _braced(text: str) -> Groups:
    return tuple(
        tuple(int(n) for n in g.split(",") if n) for g in re.findall(r"\{([\d,]*)\}", text)
    )


def _groups(instruction: Instruction) -> Groups:
    """Read `replica_groups`: listed, a reshaped and transposed count such as [2,4]<=[4,2]T(1,0), or
    axes of a mesh.
    """
    if of_mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.rest):
        return _of_mesh(*of_mesh.groups())
    if listed := instruction.attribute(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}"):
        return _braced(listed)
    found = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.rest
    )
    if not found:
        return ()
    import numpy as np

    shape, counted, order = (
        tuple(int(n) for n in (part or "").split(",") if n) for part in found.groups()
    )
    ids = np.arange(prod(counted)).reshape(counted).transpose(order or None).reshape(shape)
    return tuple(tuple(int(n) for n in group) for group in ids)


def _of_mesh(mesh: str, axes: str) -> Groups:
    """Read groups along axes of a mesh, such as 'data'=1,'fsdp'=2,'context'=2 and 'context' (jax
    0.12).
    """
    import numpy as np

    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    along = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", axes)]
    ids = np.arange(prod(sizes.values())).reshape(tuple(sizes.values()))
    across = [axis for axis in range(ids.ndim) if axis not in along]
    groups = ids.transpose(*across, *along).reshape(-1, prod(ids.shape[axis] for axis in along))
    return tuple(tuple(int(n) for n in group) for group in groups)


# ---- the whole program ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """Hold the instructions of each computation, and over how many devices the program is split."""

    computations: dict[str, list[Instruction]]
    devices: int = 1

    @staticmethod
    def read(text: str) -> _Program:
        computations: dict[str, list[Instruction]] = {}
        body: list[Instruction] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if heading := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                body = computations.setdefault(heading.group(1), [])
            elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line):
                name, type_, opcode, rest = found.groups()
                body.append(Instruction(name, opcode, type_, rest, number))
            elif body and line != "}":  # attributes may hold line breaks
                last = body[-1]
                body[-1] = Instruction(
                    last.name, last.opcode, last.type, f"{last.rest}\n{line}", last.line
                )
        partitions = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
        return _Program(computations, int(partitions.group(1)) if partitions else 1)

    @cached_property
    def wrappers(self) -> frozenset[str]:
        """Computations that hold the collective of an `async-start`."""
        return frozenset(
            name
            for body in self.computations.values()
            for i in body
            if i.opcode == "async-start"
            for name in i.called
        )

    def collective(self, instruction: Instruction) -> Instruction | None:
        """Return the collective that an instruction starts: itself, or the one that its
        `async-start` wraps.
        """
        if instruction.opcode.removesuffix("-start") in KINDS:
            return instruction
        if instruction.opcode != "async-start":
            return None
        inner = (i for name in instruction.called for i in self.computations.get(name, ()))
        return next((i for i in inner if i.opcode in KINDS), None)

    def computes(self, instruction: Instruction) -> bool:
        """Say whether an instruction is a kernel or a product, or calls a computation with one."""
        if instruction.opcode == "custom-call":
            target = instruction.attribute(r'custom_call_target="([^"]*)"')
            return target.startswith((*COMPUTING_CALLS, *custom_calls()))
        if instruction.opcode in PRODUCTS:
            return True
        return any(
            self.computes(i) for name in instruction.called for i in self.computations.get(name, ())
        )

    def times(self, computation: str) -> int:
        """Multiply the trip counts of the loops around a computation, where the text says them."""
        for name, body in self.computations.items():
            for i in body:
                if computation in i.called and i.opcode != "async-start":
                    trips = (
                        i.attribute(r'"known_trip_count":\{"n":"(\d+)"')
                        if i.opcode == "while"
                        else ""
                    )
                    return int(trips or 1) * self.times(name)
        return 1


def _closing(rest: str) -> int:
    """Return the place of the parenthesis that closes the operands."""
    depth = 1
    for place, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(rest)
