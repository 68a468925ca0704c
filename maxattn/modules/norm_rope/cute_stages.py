"""Rows on their way from the GPU's memory to shared memory, several ahead of the one computed.

The copies run on their own (`cp.async`) and hold no registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from maxattn.modules.norm_rope.cute_memory import (
    WIDEST,
    Place,
    Slots,
    load,
    start_of_row,
    values,
    vector,
)
from maxattn.modules.norm_rope.cute_threads import PAIRS

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")
cpasync: Any = import_module("cutlass.cute.nvgpu.cpasync")


class RowSource(NamedTuple):
    """Name what a thread needs of an array for a token.

    Args:
        array: in the GPU's memory.
        sizes: of its parts, in numbers.
        parts: returns where they begin.
        repeated: whether other threads of the block need the same: the first-level cache keeps it.
    """

    array: Any
    sizes: list[int]
    parts: Callable[[Any], list[Any]]
    repeated: bool = False

    def read(self, token: Any) -> list[list[Any]]:
        """Load a token's numbers to registers, part by part."""
        parts = zip(self.parts(token), self.sizes, strict=True)
        return [values(load(first, n, self.array.element_type)) for first, n in parts]


def of_rows(place: Place, rows: Any) -> RowSource:
    """Name the thread's channels of a row of [M,N,H], part by part, pass by pass."""
    parts = [part for step in range(place.threads.passes) for part in place.channels(step)]

    def begin(token: Any) -> list[Any]:
        row = start_of_row(place, rows, token)
        return [row + first for first, _ in parts]

    return RowSource(rows, [n for _, n in parts], begin)


def of_angles(place: Place, table: Any) -> RowSource:
    """Name the thread's cosines or sines of a token: [L,H/2], L dividing the tokens."""
    width = place.threads.head_dim // 2

    def begin(token: Any) -> list[Any]:
        line = table.iterator + cutlass.Int64(token % table.shape[0]) * width
        return [line + place.angle]

    return RowSource(table, [PAIRS], begin, repeated=True)


def of_numbers(numbers: Any) -> RowSource:
    """Name a token's number of [M]."""
    return RowSource(numbers, [1], lambda token: [numbers.iterator + token], repeated=True)


class Stages:
    """Copy what a thread needs of its block's rows, `depth` - 1 rows ahead.

    Args:
        place: of the thread.
        sources: what it needs.
        depth: rows in shared memory.
        late: what it loads to registers when a row's turn comes.
    """

    def __init__(
        self,
        place: Place,
        sources: list[RowSource],
        depth: int,
        late: Sequence[RowSource] = (),
    ) -> None:
        self.depth, self.sources, self.late = depth, sources, late
        self.slots = [
            [Slots(place, each.array.element_type, n, self.depth) for n in each.sizes]
            for each in sources
        ]

    def start(self, token: Any, stage: Any) -> None:
        """Begin to copy a row."""
        for source, slots in zip(self.sources, self.slots, strict=True):
            for first, each in zip(source.parts(token), slots, strict=True):
                _start(first, each, stage, source.repeated)
        cute.arch.cp_async_commit_group()

    def read(self, stage: Any) -> list[list[list[Any]]]:
        """Wait for the oldest row, and return its numbers: source by source, part by part."""
        cute.arch.cp_async_wait_group(self.depth - 2)
        return [[each.numbers(stage) for each in slots] for slots in self.slots]


def _start(first: Any, slots: Slots, stage: Any, repeated: bool) -> None:
    bits = slots.width * slots.kind.width
    modes = cpasync.LoadCacheMode
    # Past the first-level cache only copies of 16 bytes go.
    mode = modes.ALWAYS if repeated or bits < WIDEST else modes.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), slots.kind, num_bits_per_copy=bits)
    for k, piece in enumerate(slots.all(stage)):
        cute.copy(atom, vector(first + k * slots.width, slots.width, slots.kind), piece)
