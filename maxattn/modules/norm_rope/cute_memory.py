"""How a thread of the CuTe kernels reads and writes its channels: 16 bytes at a time.

What is read of a row is copied to shared memory several rows ahead (cute_stages.py), where each
thread has slots of its own: no thread waits for another.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from maxattn.modules.norm_rope.cute_steps import Heads, Pair
from maxattn.modules.norm_rope.cute_threads import PAIRS, CuteThreads

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

WIDEST = 128  # bits of a load, a store or a copy

Parts = list[tuple[Any, int]]
"""Where a thread's numbers are: (first, how many) of neighbours."""


class Place:
    """Say where a thread's channels are.

    Args:
        threads: that share a row.
        index: of the thread in its block.
    """

    def __init__(self, threads: CuteThreads, index: Any) -> None:
        self.threads, self.index = threads, index
        self.shared = import_module("cutlass.utils").SmemAllocator()
        self._lane, self._slot = index % threads.lanes, index // threads.lanes
        self._last_lane = _limit(self._lane, threads.lanes, threads.used_lanes)

    @property
    def angle(self) -> Any:
        """Return the thread's first angle of a token."""
        return self._last_lane * PAIRS

    def channels(self, step: int) -> Parts:
        """Return where the thread's channels of a row are, for its head of a pass."""
        return self._of_head(self._head(step) * self.threads.head_dim)

    def shared_channels(self) -> Parts:
        """Return the same in a vector that all heads share."""
        return self._of_head(0)

    def counted(self, step: int, value: Any) -> Any:
        """Return a value, or 0 where another thread adds the same channels to a sum."""
        threads = self.threads
        if threads.used_lanes < threads.lanes:
            value = cutlass.select_(self._lane < threads.used_lanes, value, cutlass.Float32(0.0))
        # Sums of one head stay within its threads.
        if threads.norm == "across" and threads.slots * (step + 1) > threads.heads:
            mine = self._slot + step * threads.slots < threads.heads
            value = cutlass.select_(mine, value, cutlass.Float32(0.0))
        return value

    def _head(self, step: int) -> Any:
        threads = self.threads
        head = self._slot + step * threads.slots
        return _limit(head, threads.slots * (step + 1), threads.heads)

    def _of_head(self, start: Any) -> Parts:
        if self.threads.style == "half":
            first = start + self._last_lane * PAIRS
            return [(first, PAIRS), (first + self.threads.head_dim // 2, PAIRS)]
        return [(start + self._last_lane * 2 * PAIRS, 2 * PAIRS)]


def _limit(index: Any, end: int, most: int) -> Any:
    """Keep an index below `most`; nothing to do where it ends there."""
    return index if end <= most else cutlass.min(index, cutlass.Int32(most - 1))


# ---- shared memory -------------------------------------------------------------------------------


class Slots:
    """Hold n numbers of each thread in shared memory, `depth` times.

    They lie in pieces of 16 bytes, neighbours in neighbouring threads: no two of them meet in a
    bank.
    """

    def __init__(self, place: Place, kind: Any, n: int, depth: int = 1) -> None:
        self.place, self.kind, self.depth = place, kind, depth
        self.width = min(n, WIDEST // kind.width)
        self.pieces = n // self.width
        layout = cute.make_layout(depth * n * place.threads.threads)
        self.memory = place.shared.allocate_tensor(kind, layout, 16)

    def all(self, stage: Any = 0) -> list[Any]:
        """Return the pieces of a stage."""
        return [self._piece(stage * self.pieces + k) for k in range(self.pieces)]

    def numbers(self, stage: Any = 0) -> list[Any]:
        """Return what a stage holds, in float32."""
        pieces = [loaded(piece, self.width, self.kind) for piece in self.all(stage)]
        return [x for piece in pieces for x in values(piece)]

    def _piece(self, index: Any) -> Any:
        first = (index * self.place.threads.threads + self.place.index) * self.width
        memory = cute.AddressSpace.smem
        return vector(self.memory.iterator + first, self.width, self.kind, memory)


# ---- bias and scale ------------------------------------------------------------------------------

Read = Callable[[], list[Any]]
Kept = list[list[Read]]
"""Reads of bias or scale, part by part, pass by pass."""


def keep_vector(place: Place, source: Any, where: str) -> Kept:
    """Load bias or scale: [N,H], or [1,H] for all heads.

    Args:
        place: of the thread.
        source: bias or scale.
        where: it stays: "registers", "shared" memory, or "memory", from which each row reads it.
    """
    one, keep = source.shape[0] < place.threads.heads, _KEEP[where]
    return [
        [
            keep(place, source, *part)
            for part in (place.shared_channels() if one else place.channels(step))
        ]
        for step in range(place.threads.passes)
    ]


def vector_of(place: Place, kept: Kept) -> Heads:
    """Return bias or scale as pairs, pass by pass."""
    return [pairs_of(place, [read() for read in parts]) for parts in kept]


def _in_memory(place: Place, source: Any, first: Any, n: int) -> Read:
    return lambda: values(load(source.iterator + first, n, source.element_type))


def _in_registers(place: Place, source: Any, first: Any, n: int) -> Read:
    registers = load(source.iterator + first, n, source.element_type)
    return lambda: values(registers)


def _in_shared(place: Place, source: Any, first: Any, n: int) -> Read:
    slots = Slots(place, source.element_type, n)
    for k, piece in enumerate(slots.all()):
        start = source.iterator + (first + k * slots.width)
        cute.autovec_copy(load(start, slots.width, slots.kind), piece)
    return slots.numbers


_KEEP = {"registers": _in_registers, "shared": _in_shared, "memory": _in_memory}


# ---- numbers -------------------------------------------------------------------------------------


def values(registers: Any) -> list[Any]:
    """Return what registers hold in float32, number by number."""
    found = registers.load().to(cutlass.Float32)
    return [found[i] for i in range(cute.size(registers.shape))]


def pairs_of(place: Place, parts: list[list[Any]]) -> Pair:
    """Return a head's channels as pairs of the rotary embedding."""
    if place.threads.style == "half":
        return parts[0], parts[1]
    return parts[0][::2], parts[0][1::2]


def zeros(place: Place) -> list[list[Any]]:
    """Return float32 sums for the thread's channels, as pairs, pass by pass."""
    found = []
    for _ in range(place.threads.passes):
        both = [new_registers(PAIRS, cutlass.Float32) for _ in range(2)]
        for registers in both:
            registers.fill(0.0)
        found.append(both)
    return found


# ---- global memory -------------------------------------------------------------------------------


def store_head(place: Place, into: Any, token: Any, step: int, pair: Pair) -> None:
    """Store a head's channels of a row of [M,N,H]."""
    row, kind = start_of_row(place, into, token), into.element_type
    first, second = pair
    joined = [x for both in zip(first, second, strict=True) for x in both]
    parts = [first, second] if place.threads.style == "half" else [joined]
    for (start, n), part in zip(place.channels(step), parts, strict=True):
        numbers, rounded = new_registers(n, cutlass.Float32), new_registers(n, kind)
        for i, x in enumerate(part):
            numbers[i] = x
        rounded.store(numbers.load().to(kind))
        cute.autovec_copy(rounded, vector(row + start, n, kind))


def start_of_row(place: Place, rows: Any, token: Any) -> Any:
    """Return where a row of [M,N,H] begins: there may be more than 2**31 numbers before it."""
    return rows.iterator + cutlass.Int64(token) * (place.threads.heads * place.threads.head_dim)


def load(pointer: Any, n: int, kind: Any) -> Any:
    """Load n numbers of the GPU's memory to registers."""
    return loaded(vector(pointer, n, kind), n, kind)


def loaded(numbers: Any, n: int, kind: Any) -> Any:
    """Copy n numbers of any memory to registers."""
    registers = new_registers(n, kind)
    cute.autovec_copy(numbers, registers)
    return registers


def new_registers(n: int, kind: Any) -> Any:
    """Return registers for n numbers."""
    return cute.make_rmem_tensor(cute.make_layout(n), kind)


def vector(pointer: Any, n: int, kind: Any, memory: Any = None) -> Any:
    """Return n numbers in memory, as many of them loaded at once as 16 bytes hold."""
    align = min(WIDEST, n * kind.width) // 8
    space = cute.AddressSpace.gmem if memory is None else memory
    aligned = cute.make_ptr(kind, pointer.toint(), space, assumed_align=align)
    return cute.make_tensor(aligned, cute.make_layout(n))
