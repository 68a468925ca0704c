"""What a compiled program sends between devices, read off the text of its HLO: text in, values out.

What stands between a `-start` and its `-done` runs while the data is under way. Nothing is compiled
here, and no plan is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from maxattn.tools.compile.hlo_groups import Groups, bytes_of, groups_of
from maxattn.tools.compile.hlo_text import KINDS, HloProgram, Instruction


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
    program = HloProgram.read(text)
    # A wrapper's collective is listed where `async-start` calls it.
    names = (name for name in program.computations if name not in program.wrappers)
    found = [t for name in names for t in _of_computation(program, name)]
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


def _of_computation(program: HloProgram, name: str) -> Iterator[Transfer]:
    body = program.computations[name]
    done = {start: i for i, one in enumerate(body) for start in _waited_for(one)}
    for place, instruction in enumerate(body):
        found = program.collective(instruction)
        if found is not None:
            end = done.get(instruction.name, place)
            yield _transfer(program, name, found, body[place : end + 1])


def _waited_for(instruction: Instruction) -> tuple[str, ...]:
    return instruction.operands if instruction.opcode.endswith("-done") else ()


def _transfer(
    program: HloProgram, computation: str, found: Instruction, span: Sequence[Instruction]
) -> Transfer:
    """Describe a collective.

    Args:
        program: all computations.
        computation: the one that it stands in.
        found: the instruction that says what moves and where to.
        span: from start to done; the type of the last one is what arrives.
    """
    opcode, groups = found.opcode.removesuffix("-start"), groups_of(found, program.devices)
    ways = max(map(len, groups), default=1)
    between, start, done = span[1:-1], span[0], span[-1]
    fusions = (i for i in between if i.opcode == "fusion")
    return Transfer(
        kind=KINDS[opcode],
        name=start.name,
        computation=computation,
        groups=groups,
        bytes=_received(opcode, bytes_of(done.type), ways),
        start=start.line,
        done=done.line,
        times=program.times(computation),
        kernels=tuple(i.name for i in between if program.computes(i)),
        others=sum(not program.computes(i) for i in fusions),
        op_name=_op_name(start, found, done),
    )


def _op_name(*instructions: Instruction) -> str:
    names = (i.attribute(r'op_name="([^"]*)"') for i in instructions)
    return next((name for name in names if name), "")


def _received(opcode: str, result: int, ways: int) -> int:
    if opcode in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result * (ways - 1) // ways
    return result * (ways - 1) if opcode == "reduce-scatter" else result
