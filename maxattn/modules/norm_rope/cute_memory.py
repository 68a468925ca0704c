"""How a thread of the CuTe kernels reads and writes its channels: 16 bytes at a time.

Loads are left in registers as they stand in memory (`Raw`), so that the next row can be loaded
while one is computed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from maxattn.modules.norm_rope.cute_steps import Pair
from maxattn.modules.norm_rope.cute_threads import PAIRS, CuteThreads

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

Raw = list[Any]
"""A head's channels of one thread in registers: one array of neighbours, or one of each half."""


class Place:
    """Say where a thread's channels are.

    Args:
        threads: that share a row.
        index: of the thread in its block.
    """

    def __init__(self, threads: CuteThreads, index: Any) -> None:
        self.threads = threads
        self._lane, self._slot = index % threads.lanes, index // threads.lanes
        self._last_lane = _limit(self._lane, threads.lanes, threads.used_lanes)

    @property
    def angle(self) -> Any:
        """Return the thread's first angle of a token."""
        return self._last_lane * PAIRS

    def channels(self, step: int) -> list[tuple[Any, int]]:
        """Return the (first channel in a row, how many) of the thread's head in a pass."""
        return self._of_head(self._head(step) * self.threads.head_dim)

    def shared_channels(self) -> list[tuple[Any, int]]:
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

    def _of_head(self, start: Any) -> list[tuple[Any, int]]:
        if self.threads.style == "half":
            first = start + self._last_lane * PAIRS
            return [(first, PAIRS), (first + self.threads.head_dim // 2, PAIRS)]
        return [(start + self._last_lane * 2 * PAIRS, 2 * PAIRS)]


def _limit(index: Any, end: int, most: int) -> Any:
    """Keep an index below `most`; nothing to do where it ends there."""
    return index if end <= most else cutlass.min(index, cutlass.Int32(most - 1))


# ---- loads ---------------------------------------------------------------------------------------


def new_row(place: Place, like: Any) -> list[Raw]:
    """Return registers for a row, pass by pass."""
    return [
        [_registers(n, like.element_type) for _, n in place.channels(step)]
        for step in range(place.threads.passes)
    ]


def load_row(place: Place, source: Any, token: Any, into: list[Raw]) -> None:
    """Load the thread's channels of a row of [M,N,H]."""
    row = start_of_row(place, source, token)
    for step, raw in enumerate(into):
        for (first, n), registers in zip(place.channels(step), raw, strict=True):
            cute.autovec_copy(_vector(row + first, n, source.element_type), registers)


def load_vector(place: Place, source: Any) -> list[Raw]:
    """Load bias or scale: [N,H], or [1,H] for all heads."""
    shared = source.shape[0] < place.threads.heads
    found = new_row(place, source)
    for step, raw in enumerate(found):
        channels = place.shared_channels() if shared else place.channels(step)
        for (first, n), registers in zip(channels, raw, strict=True):
            cute.autovec_copy(_vector(source.iterator + first, n, source.element_type), registers)
    return found


def new_angles(place: Place) -> list[Any]:
    """Return registers for cosines and sines of a token; nothing without a rotary embedding."""
    count = 0 if place.threads.style is None else 2
    return [_registers(PAIRS, cutlass.Float32) for _ in range(count)]


def load_angles(place: Place, tables: Any, token: Any, into: list[Any]) -> None:
    """Load the cosines and sines of a token: [L,H/2], L dividing the tokens."""
    for table, registers in zip(tables, into, strict=True):
        width = place.threads.head_dim // 2
        line = table.iterator + cutlass.Int64(token % table.shape[0]) * width
        cute.autovec_copy(_vector(line + place.angle, PAIRS, cutlass.Float32), registers)


def values(registers: Any) -> list[Any]:
    """Return what registers hold in float32, number by number."""
    found = registers.load().to(cutlass.Float32)
    return [found[i] for i in range(cute.size(registers.shape))]


def pairs_of(place: Place, raw: Raw) -> Pair:
    """Return a head's channels as pairs of the rotary embedding."""
    found = [values(registers) for registers in raw]
    return (
        (found[0], found[1]) if place.threads.style == "half" else (found[0][::2], found[0][1::2])
    )


# ---- stores --------------------------------------------------------------------------------------


def store_head(place: Place, into: Any, token: Any, step: int, pair: Pair) -> None:
    """Store a head's channels of a row of [M,N,H]."""
    row, kind = start_of_row(place, into, token), into.element_type
    first, second = pair
    joined = [x for both in zip(first, second, strict=True) for x in both]
    parts = [first, second] if place.threads.style == "half" else [joined]
    for (start, n), part in zip(place.channels(step), parts, strict=True):
        numbers, rounded = _registers(n, cutlass.Float32), _registers(n, kind)
        for i, x in enumerate(part):
            numbers[i] = x
        rounded.store(numbers.load().to(kind))
        cute.autovec_copy(rounded, _vector(row + start, n, kind))


def start_of_row(place: Place, rows: Any, token: Any) -> Any:
    """Return where a row of [M,N,H] begins: there may be more than 2**31 numbers before it."""
    return rows.iterator + cutlass.Int64(token) * (place.threads.heads * place.threads.head_dim)


def zeros(place: Place) -> list[list[Any]]:
    """Return float32 sums for the thread's channels, as pairs, pass by pass."""
    found = []
    for _ in range(place.threads.passes):
        both = [_registers(PAIRS, cutlass.Float32) for _ in range(2)]
        for registers in both:
            registers.fill(0.0)
        found.append(both)
    return found


def _registers(n: int, kind: Any) -> Any:
    return cute.make_rmem_tensor(cute.make_layout(n), kind)


def _vector(pointer: Any, n: int, kind: Any) -> Any:
    """Return n numbers in memory, as many of them loaded at once as 16 bytes hold."""
    align = min(16, n * kind.width // 8)
    memory = cute.AddressSpace.gmem
    aligned = cute.make_ptr(kind, pointer.toint(), memory, assumed_align=align)
    return cute.make_tensor(aligned, cute.make_layout(n))
