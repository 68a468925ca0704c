"""The row kernel: what the threads of a block do to its rows. All arithmetic is float32.

A block takes neighbouring rows, one after another: they mostly share their vectors, which stay
with the block until a row has others.

CuTe comes with fa4-jax: this file is imported when a kernel is compiled.
"""

from __future__ import annotations

from importlib import import_module
from itertools import chain
from operator import mul
from typing import Any, NamedTuple

from maxattn.modules.row_kernel.thread import (
    Place,
    Row,
    Slots,
    Stages,
    add_to,
    added_up,
    each,
    layer_normed,
    means,
    most,
    new_registers,
    of_angles,
    of_numbers,
    of_rows,
    over_lanes,
    over_roots,
    plus,
    rotated,
    times,
    total,
    zeros,
)
from maxattn.modules.row_kernel.work import OCTET, WARP, RowLaunch

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

CARVEOUT = 100  # percent of what shared memory can have of the first-level cache


class OneOfPair(NamedTuple):
    """One of two arrays of the same kind, chosen by the block's number."""

    iterator: Any
    element_type: Any
    shape: Any


def one_of(arrays: Any, second: Any) -> Any:
    """Return the array of the block's job: of queries or of keys, or the only one."""
    if len(arrays) == 1:
        return arrays[0]
    kind, shape = arrays[0].element_type, arrays[0].shape
    start = cutlass.select_(second, arrays[1].iterator.toint(), arrays[0].iterator.toint())
    pointer = cute.make_ptr(kind, start, cute.AddressSpace.gmem, assumed_align=16)
    return OneOfPair(pointer, kind, shape)


class Block(NamedTuple):
    """What a thread keeps from row to row."""

    place: Place
    shared: Any  # [2, 2, warps], in which warps leave their sums
    count: Any  # how many channels its warp has of its own
    vectors: dict[str, list[Any]]  # by pass: registers, or slots in shared memory
    first: Any  # row of the block
    last: Any  # and the row after its last
    stages: Stages

    def next(self, row: Any) -> list[Any]:
        """Return what a row needs, source by source, and begin to copy one that comes later."""
        depth, i = self.stages.depth, row - self.first
        found = self.stages.read(i % depth)
        later = i + depth - 1
        self.stages.start(cutlass.min(self.first + later, self.last - 1), later % depth)
        return found

    def as_row(self, parts: list[list[Any]]) -> Row:
        """Join the parts of a row, pass by pass."""
        n = len(parts) // self.place.work.passes
        return [list(chain(*parts[k : k + n])) for k in range(0, len(parts), n)]

    def vector(self, name: str) -> Row | None:
        """Return a vector as a row; None where there is none."""
        if name not in self.vectors:
            return None
        held = self.vectors[name]
        return [v.read() if isinstance(v, Slots) else [v[i] for i in range(OCTET)] for v in held]


def hold(block: Block, parts: Any, example: Any, frame: Any) -> None:
    """Load the vectors of a frame, each the sum of its parts and of a constant."""
    left, place = iter(parts), block.place
    for name, vector in place.work.vectors:
        loaded = []
        for row in vector.rows:
            array = next(left)
            batch, frames, height, width = array.shape
            line = (example % batch * frames + frame % frames) * height + row
            loaded.append(place.load(array, line * width, width < place.work.channels))
        for into, numbers in zip(block.vectors[name], each(added_up, *loaded), strict=True):
            numbers = [x + vector.constant for x in numbers] if vector.constant else numbers
            if isinstance(into, Slots):
                into.write(numbers)
            else:
                for i, x in enumerate(numbers):
                    into[i] = x


class RowKernel:
    """What forward and backward share."""

    def __init__(self, launch: RowLaunch, first: int | None = None) -> None:
        # `first`: where an example's rows begin in a longer sequence, to which they are stored.
        self.launch, self.work, self.first = launch, launch.work, first

    def options(self, rows: Any, stream: Any) -> dict[str, Any]:
        """Return how it is launched: with registers few enough that an SM holds its blocks."""
        jobs, (batch, length, _) = len(rows), rows[0].shape
        blocks = cutlass.min(batch * length, max(1, self.launch.blocks // jobs))
        return {
            "grid": [jobs * blocks, 1, 1],
            "block": [self.work.threads, 1, 1],
            "stream": stream,
            "min_blocks_per_mp": self.launch.per_sm,
            "preferred_smem_carveout": CARVEOUT,
        }

    def begin(self, place: Place, sources: list[Any], rows: Any, jobs: int) -> Block:
        """Return what a thread keeps, before its block's first row."""
        work, blocks = self.work, cute.arch.grid_dim()[0] // jobs
        tokens, number = rows.shape[0] * rows.shape[1], cute.arch.block_idx()[0] % blocks
        every, more = tokens // blocks, tokens % blocks
        first = number * every + cutlass.min(number, more)
        last = first + every + cutlass.select_(number < more, cutlass.Int32(1), cutlass.Int32(0))
        shape, stride = (2, 2, work.warps), (2 * work.warps, work.warps, 1)
        layout = cute.make_layout(shape, stride=stride)
        shared = place.shared.allocate_tensor(cutlass.Float32, layout, 16)
        count: Any = float(OCTET * WARP * work.passes)
        if work.norm == "layer" and not work.is_full:
            octet = cutlass.Float32(OCTET)
            count = over_lanes(total([place.own(p, octet) for p in range(work.passes)]), WARP)
        vectors: dict[str, list[Any]] = {}
        for name, _ in work.vectors:
            if self.launch.is_backward:
                held = [Slots(place, cutlass.Float32, OCTET) for _ in range(work.passes)]
            else:
                held = [new_registers(OCTET, cutlass.Float32) for _ in range(work.passes)]
            vectors[name] = held
        stages = Stages(place, sources, self.launch.stages)
        for i in range(stages.depth - 1):
            stages.start(cutlass.min(first + i, last - 1), i)
        return Block(place, shared, count, vectors, first, last, stages)


class Forward(RowKernel):
    """Norm and rotate rows, after adding them to others where there are any."""

    @cute.jit
    def __call__(self, rows: Any, parts: Any, tables: Any, results: Any, stream: Any) -> None:
        """Launch it; arguments as for `call.forward`, each operand but the tables a tuple of one
        array, or of two: half of the blocks take each.
        """
        work = self.kernel(rows, parts, tables, results)
        work.launch(**self.options(rows[0], stream))

    @cute.kernel
    def kernel(self, rows: Any, parts: Any, tables: Any, results: Any) -> None:
        """Take the block's rows, frame by frame."""
        jobs = len(rows[0])
        second = cute.arch.block_idx()[0] >= cute.arch.grid_dim()[0] // jobs
        rows = [one_of(arrays, second) for arrays in rows]
        parts = [one_of(arrays, second) for arrays in parts]
        results = [one_of(arrays, second) for arrays in results]
        place: Any = Place(self.work, cute.arch.thread_idx()[0])
        early, late = self.sources(place, rows, tables)
        block = self.begin(place, early, rows[0], jobs)
        length = rows[0].shape[1]
        if cutlass.const_expr(self.all_rows_share(parts)):
            hold(block, parts, 0, 0)
            for row in cutlass.range(block.first, block.last):
                self.take(block, row, late, length, results)
        else:
            frames = most([part.shape[1] for part in parts])
            span = length // frames
            for group in cutlass.range(block.first // span, (block.last - 1) // span + 1):
                hold(block, parts, group // frames, group % frames)
                first = cutlass.max(block.first, group * span)
                last = cutlass.min(block.last, (group + 1) * span)
                for row in cutlass.range(first, last):
                    self.take(block, row, late, length, results)

    def all_rows_share(self, parts: Any) -> bool:
        """Say whether it is known when the kernel is compiled that all rows have one vector."""
        return all(isinstance(n, int) and n == 1 for part in parts for n in part.shape[:2])

    def sources(self, place: Place, rows: Any, tables: Any) -> tuple[list[Any], list[Any]]:
        """Return what is copied ahead, and what is loaded when a row's turn comes: angles, where
        they arrive while the block adds up a row.
        """
        of_all, turns = [of_rows(place, x) for x in rows], [of_angles(place, t) for t in tables]
        return (of_all, turns) if self.work.norm == "across" else (of_all + turns, [])

    def take(self, block: Block, row: Any, late: Any, length: Any, results: Any) -> None:
        """Compute a row."""
        arriving = [each.read(row)[0] for each in late]
        found = block.next(row)
        arrays = len(found) if late else len(found) - (2 if self.work.style else 0)
        *before, x = [block.as_row(parts) for parts in found[:arrays]]
        angles = arriving or [parts[0] for parts in found[arrays:]]
        z = times(plus(x, block.vector("bias")), block.vector("gate"))
        y, *others = results
        for other in before:
            z = block.place.store(others[0], row, plus(other, z))
        if self.work.norm == "layer":
            u = layer_normed(block, z, row)
        elif self.work.norm is None:
            u = z
        else:
            roots = over_roots(block, z, row)
            u = times(z, roots)
            if not before and others:
                others[0][row] = roots[0][0]
        u = plus(times(u, block.vector("scale")), block.vector("shift"))
        block.place.store(y, self.place_in(y, row, length), rotated(self.work.style, u, *angles))

    def place_in(self, y: Any, row: Any, length: Any) -> Any:
        """Return the row of y, [B, L, N H], that a row of [B, T, N H] is stored to."""
        if self.first is None:
            return row
        return row // length * y.shape[1] + row % length + self.first


class Backward(RowKernel):
    """Take gradients of rows back, and add up those of bias and scale."""

    @cute.jit
    def __call__(
        self, rows: Any, kept: Any, parts: Any, tables: Any, dx: Any, sums: Any, stream: Any
    ) -> None:
        """Launch it; arguments as for `call.backward`, with sums [blocks, 1, N H]."""
        work = self.kernel(rows, kept, parts, tables, dx, sums)
        work.launch(**self.options((dx,), stream))

    @cute.kernel
    def kernel(self, rows: Any, kept: Any, parts: Any, tables: Any, dx: Any, sums: Any) -> None:
        """Take the block's rows, then store its sums."""
        place: Any = Place(self.work, cute.arch.thread_idx()[0])
        sources = [of_rows(place, each) for each in rows]
        sources += [of_angles(place, each) for each in tables]
        sources += [of_numbers(each) for each in kept]
        block = self.begin(place, sources, dx, 1)
        hold(block, parts, 0, 0)
        added = {name: zeros(self.work.passes) for name, _ in self.work.vectors}
        for row in cutlass.range(block.first, block.last):
            self.take(block, row, added, dx)
        self.store_sums(place, added, sums)

    def store_sums(self, place: Place, added: Any, sums: Any) -> None:
        for (name, _), into in zip(self.work.vectors, sums, strict=True):
            found = [[registers[i] for i in range(OCTET)] for registers in added[name]]
            place.store(into, cute.arch.block_idx()[0], found)

    def take(self, block: Block, row: Any, added: Any, dx: Any) -> None:
        """Compute a row: z = x + bias, n = z r, y = rotate(n scale), and back."""
        dy, x, *more = block.next(row)
        turns, kept = (more[:2], more[2:]) if self.work.style else ([], more)
        z = plus(block.as_row(x), block.vector("bias"))
        angles = [turns[0][0], [-a for a in turns[1][0]]] if turns else []
        du = rotated(self.work.style, block.as_row(dy), *angles)
        roots = None
        if self.work.norm is not None:
            roots = [[r[0][0]] * OCTET for r in kept] * self.work.passes
            roots = roots or over_roots(block, z, row)
        # Before the sum over threads, so that registers hold `du` no longer than that.
        add_to(added, "scale", lambda: times(each(mul, du, z), roots))
        dz = times(du, block.vector("scale"))
        if roots is not None:
            # (g - z mean(g z) r^2) r
            slopes = [
                [m[0] * r[0] * r[0]] * OCTET
                for m, r in zip(means(block, dz, z, row), roots, strict=True)
            ]
            dz = each(lambda g, v, slope, r: (g - v * slope) * r, dz, z, slopes, roots)
        block.place.store(dx, row, dz)
        add_to(added, "bias", lambda: dz)


# ---- calls ---------------------------------------------------------------------------------------


def run_forward(stream: Any, launch: Any, first: Any, *operands: Any) -> None:
    """Launch a forward while it is compiled; the fourth operand is what y's memory has before."""
    rows, parts, tables, _, *results = operands
    Forward(launch, first)(rows, parts, tables, results, stream)


def run_backward(stream: Any, launch: Any, *operands: Any) -> None:
    """Launch a backward while it is compiled."""
    rows, kept, parts, tables, dx, *sums = operands
    Backward(launch)(rows, kept, parts, tables, dx, sums, stream)
