"""The loads, stores and arithmetic of a thread of the row kernel.

Rows are copied to shared memory ahead of the row that is computed. Each thread reads its own slots
there, so that no thread waits for another. A `Row` is the channels of a row that one thread
computes, in float32, 8 for each pass: CuTe values in Python lists, unrolled at compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import chain
from operator import add, mul
from typing import Any, NamedTuple

from maxattn.modules.row_kernel.work import OCTET, WARP, RowWork

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")
cpasync: Any = import_module("cutlass.cute.nvgpu.cpasync")
smem: Any = import_module("cutlass.memory")

WIDEST = 128  # bits of a load, a store or a copy
HALF = OCTET // 2
Row = list[list[Any]]


class Place:
    """The channels of thread `index` of a block."""

    def __init__(self, work: RowWork, index: Any) -> None:
        self.work, self.index, self.shared = work, index, smem.SmemAllocator()
        self._lane, self._slot = index % work.lanes, index // work.lanes
        self.lane = _limit(self._lane, work.lanes, work.used_lanes)

    def channels(self, step: int, one_head: bool = False) -> list[tuple[Any, int]]:
        """Return (first, count) of the channels of a pass, in a row or in a vector of one head."""
        work = self.work
        head = _limit(self._slot + step * work.slots, work.slots * (step + 1), work.heads)
        start = 0 if one_head else head * work.head_dim
        if work.style == "half":
            first = start + self.lane * HALF
            return [(first, HALF), (first + work.head_dim // 2, HALF)]
        return [(start + self.lane * OCTET, OCTET)]

    def own(self, step: int, value: Any) -> Any:
        """Return a value for a sum over threads: 0 if another thread adds the same channels."""
        work, zero = self.work, cutlass.Float32(0.0)
        if work.used_lanes < work.lanes:
            value = cutlass.select_(self._lane < work.used_lanes, value, zero)
        # Sums over one head stay within its threads.
        if work.norm != "head" and work.slots * (step + 1) > work.heads:
            value = cutlass.select_(self._slot + step * work.slots < work.heads, value, zero)
        return value

    def load(self, array: Any, start: Any, one_head: bool = False) -> Row:
        """Load the thread's channels of the row or vector that begins at `start`."""
        begin, kind = array.iterator + start, array.element_type
        steps = (self.channels(step, one_head) for step in range(self.work.passes))
        return [list(chain(*(load(begin + at, n, kind) for at, n in parts))) for parts in steps]

    def store(self, into: Any, number: Any, row: Row) -> Row:
        """Store row `number` of an array [B, T, N H], and return the rounded row."""
        rounded, kind = [[] for _ in row], into.element_type
        for step, numbers in enumerate(row):
            for k, (first, n) in enumerate(self.channels(step)):
                registers = rounded_registers(numbers[k * n : (k + 1) * n], kind)
                cute.autovec_copy(registers, vector(self.row(into, number) + first, n, kind))
                rounded[step] += values(registers)
        return rounded

    def row(self, rows: Any, number: Any) -> Any:
        # The offset of a row may be above 2**31.
        return rows.iterator + cutlass.Int64(number) * self.work.channels


def _limit(index: Any, end: int, most: int) -> Any:
    """Clip an index to below `most`; the index is known to be below `end`."""
    return index if end <= most else cutlass.min(index, cutlass.Int32(most - 1))


# ---- numbers -------------------------------------------------------------------------------------


def vector(pointer: Any, n: int, kind: Any, memory: Any = None) -> Any:
    """Return the n numbers at a pointer, aligned for loads of up to 16 bytes."""
    align = min(WIDEST, n * kind.width) // 8
    space = cute.AddressSpace.gmem if memory is None else memory
    aligned = cute.make_ptr(kind, pointer.toint(), space, assumed_align=align)
    return cute.make_tensor(aligned, cute.make_layout(n))


def load(pointer: Any, n: int, kind: Any, memory: Any = None) -> list[Any]:
    registers = new_registers(n, kind)
    cute.autovec_copy(vector(pointer, n, kind, memory), registers)
    return values(registers)


def values(registers: Any) -> list[Any]:
    found = registers.load().to(cutlass.Float32)
    return [found[i] for i in range(cute.size(registers.shape))]


def new_registers(n: int, kind: Any) -> Any:
    return cute.make_rmem_tensor(cute.make_layout(n), kind)


def rounded_registers(numbers: list[Any], kind: Any) -> Any:
    exact, rounded = new_registers(len(numbers), cutlass.Float32), new_registers(len(numbers), kind)
    for i, x in enumerate(numbers):
        exact[i] = x
    rounded.store(exact.load().to(kind))
    return rounded


# ---- shared memory -------------------------------------------------------------------------------


class Slots:
    """Shared memory with `depth` slots of n numbers for each thread.

    The 16-byte pieces of neighbouring threads are adjacent, which avoids bank conflicts.
    """

    def __init__(self, place: Place, kind: Any, n: int, depth: int) -> None:
        self.place, self.kind = place, kind
        self.width = min(n, WIDEST // kind.width)
        self.pieces = n // self.width
        layout = cute.make_layout(depth * n * place.work.threads)
        self.memory = place.shared.allocate_tensor(kind, layout, 16)

    def pointers(self, stage: Any) -> list[Any]:
        numbers = (stage * self.pieces + k for k in range(self.pieces))
        threads, index = self.place.work.threads, self.place.index
        return [self.memory.iterator + (k * threads + index) * self.width for k in numbers]

    def read(self, stage: Any) -> list[Any]:
        shared = cute.AddressSpace.smem
        pieces = (load(start, self.width, self.kind, shared) for start in self.pointers(stage))
        return list(chain(*pieces))


class RowSource(NamedTuple):
    """The numbers of an array that a thread needs for a row, in contiguous parts."""

    kind: Any
    sizes: list[int]  # numbers of each part
    parts: Callable[[Any], list[Any]]  # the row's number -> the beginnings of its parts
    repeated: bool = False  # other threads of the block read them too: the L1 cache keeps them

    def read(self, number: Any) -> list[list[Any]]:
        parts = zip(self.parts(number), self.sizes, strict=True)
        return [load(first, n, self.kind) for first, n in parts]


def of_rows(place: Place, rows: Any) -> RowSource:
    """Return the source of the thread's channels in rows of [B, T, N H], pass by pass."""
    parts = [part for step in range(place.work.passes) for part in place.channels(step)]
    begin: Any = lambda number: [place.row(rows, number) + first for first, _ in parts]  # noqa: E731
    return RowSource(rows.element_type, [n for _, n in parts], begin)


def of_angles(place: Place, table: Any) -> RowSource:
    """Return the source of the thread's cosines or sines in [L, H/2]; L divides the rows."""
    width = place.work.head_dim // 2

    def begin(number: Any) -> list[Any]:
        line = table.iterator + cutlass.Int64(number % table.shape[0]) * width
        return [line + place.lane * HALF]

    return RowSource(table.element_type, [HALF], begin, repeated=True)


class Stages:
    """Asynchronous copies (`cp.async`) of a block's rows, `depth` - 1 rows ahead."""

    def __init__(self, place: Place, sources: list[RowSource], depth: int) -> None:
        self.depth, self.sources = depth, sources
        self.slots = [[Slots(place, each.kind, n, depth) for n in each.sizes] for each in sources]

    def start(self, number: Any, stage: Any) -> None:
        for source, slots in zip(self.sources, self.slots, strict=True):
            for first, each in zip(source.parts(number), slots, strict=True):
                _copy(first, each, stage, source.repeated)
        cute.arch.cp_async_commit_group()

    def read(self, stage: Any) -> list[list[list[Any]]]:
        """Wait for the oldest row, and return its numbers, source by source and part by part."""
        cute.arch.cp_async_wait_group(self.depth - 2)
        return [[each.read(stage) for each in slots] for slots in self.slots]


def _copy(first: Any, slots: Slots, stage: Any, repeated: bool) -> None:
    bits, modes = slots.width * slots.kind.width, cpasync.LoadCacheMode
    # Only copies of 16 bytes can bypass the first-level cache.
    mode = modes.ALWAYS if repeated or bits < WIDEST else modes.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), slots.kind, num_bits_per_copy=bits)
    for k, start in enumerate(slots.pointers(stage)):
        piece = vector(start, slots.width, slots.kind, cute.AddressSpace.smem)
        cute.copy(atom, vector(first + k * slots.width, slots.width, slots.kind), piece)


# ---- rows ----------------------------------------------------------------------------------------


def each(f: Callable[..., Any], *rows: Row) -> Row:
    return [[f(*x) for x in zip(*passes, strict=True)] for passes in zip(*rows, strict=True)]


def plus(x: Row, y: Row | None, f: Callable[..., Any] = add) -> Row:
    return x if y is None else each(f, x, y)


times = partial(plus, f=mul)


def rotated(style: str | None, row: Row, cos: Any = None, sin: Any = None) -> Row:
    """Rotate each pair of channels by its angle; None changes nothing."""
    if style is None:
        return row
    found = []
    for x in row:
        pairs = (x[:HALF], x[HALF:]) if style == "half" else (x[::2], x[1::2])
        parts = list(zip(*pairs, cos, sin, strict=True))
        first = [a * c - b * s for a, b, c, s in parts]
        second = [a * s + b * c for a, b, c, s in parts]
        joined = [x for pair in zip(first, second, strict=True) for x in pair]
        found.append(first + second if style == "half" else joined)
    return found


def total(numbers: list[Any]) -> Any:
    """Sum numbers pairwise, in a tree."""
    while len(numbers) > 1:
        odd = numbers[len(numbers) & ~1 :]
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=False)] + odd
    return numbers[0]


# ---- moments -------------------------------------------------------------------------------------


def over_roots(block: Any, z: Row, row: Any) -> Row:
    """Return 1 / sqrt(mean(z^2) + eps), the factor of an RMS norm, for each channel."""
    work = block.place.work
    sums = [block.place.own(step, total(p)) for step, p in enumerate(each(mul, z, z))]
    if work.norm == "head":
        means = [over_lanes(s, work.lanes) * (1.0 / work.head_dim) for s in sums]
    else:
        parts = of_warps(block, [over_lanes(total(sums), WARP)], row)
        means = [total([part[0] for part in parts]) * (1.0 / work.channels)] * work.passes
    return [[cute.math.rsqrt(m + work.eps, fastmath=True)] * OCTET for m in means]


def layer_normed(block: Any, z: Row, row: Any) -> Row:
    """Return (z - mean) / sqrt(variance + eps), accurately even if the mean is large.

    The means and squared distances of the warps are merged as in Chan, Golub and LeVeque (1979).
    """
    work, place, one = block.place.work, block.place, cutlass.Float32(1.0)
    is_full, count = work.is_full, block.count
    count = count if is_full else cutlass.select_(count > 0.0, count, one)
    sums = [place.own(step, total(x)) for step, x in enumerate(z)]
    mean = over_lanes(total(sums), WARP) * (1.0 / count)
    apart = [[x - mean for x in numbers] for numbers in z]
    sums = [place.own(step, total(x)) for step, x in enumerate(each(mul, apart, apart))]
    parts = of_warps(block, [mean, over_lanes(total(sums), WARP)], row)
    counts = [work.of_warp(warp) for warp in range(work.warps)]
    merged = [(n, *part) for n, part in zip(counts, parts, strict=True) if n]
    mean = total([m * (n / work.channels) for n, m, _ in merged])
    squares = total([s + (m - mean) * (m - mean) * float(n) for n, m, s in merged])
    root = cute.math.rsqrt(squares * (1.0 / work.channels) + work.eps, fastmath=True)
    return [[(x - mean) * root for x in numbers] for numbers in z]


def over_lanes(x: Any, width: int) -> Any:
    """Sum over `width` neighbouring threads."""
    for step in range(width.bit_length() - 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << step)
    return x


def of_warps(block: Any, numbers: list[Any], row: Any) -> list[list[Any]]:
    """Return all warps' numbers, once per row; one barrier, since rows alternate in memory."""
    warps, turn = block.place.work.warps, (row - block.first) % 2
    if warps == 1:
        return [numbers]
    for k, x in enumerate(numbers):
        # All threads of a warp store the same value.
        block.shared[turn, k, cute.arch.warp_idx()] = x
    cute.arch.sync_threads()
    return [[block.shared[turn, k, w] for k in range(len(numbers))] for w in range(warps)]
