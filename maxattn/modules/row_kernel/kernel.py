"""The row kernel, forward and backward. All arithmetic is float32.

A block computes neighbouring rows, one after another. Most of them share their vectors, which the
block loads again only if a row has others. CuTe comes with fa4-jax: this file is imported when a
kernel is compiled.
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
    each,
    layer_normed,
    means,
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
)
from maxattn.modules.row_kernel.work import OCTET, WARP, RowLaunch

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

CARVEOUT = 100  # percent of the first-level cache that may become shared memory


class Block(NamedTuple):
    """The state that a thread keeps between rows."""

    place: Place
    shared: Any  # [2, 2, warps]: the sums of each warp
    count: Any  # the number of channels that belong to the thread's warp
    vectors: dict[str, list[Any]]  # by pass: registers, or slots in shared memory
    first: Any  # the block's first row
    last: Any  # the row after the block's last row
    stages: Stages

    def next(self, row: Any) -> list[Any]:
        """Return the numbers of a row, source by source, and start to copy a later row."""
        depth, i = self.stages.depth, row - self.first
        found = self.stages.read(i % depth)
        later = i + depth - 1
        self.stages.start(cutlass.min(self.first + later, self.last - 1), later % depth)
        return found

    def as_row(self, parts: list[list[Any]]) -> Row:
        n = len(parts) // self.place.work.passes
        return [list(chain(*parts[k : k + n])) for k in range(0, len(parts), n)]

    def vector(self, name: str) -> Row | None:
        if name not in self.vectors:
            return None
        held = self.vectors[name]
        return [v.read() if isinstance(v, Slots) else [v[i] for i in range(OCTET)] for v in held]


def hold(block: Block, parts: Any, example: Any, frame: Any) -> None:
    """Load the vectors of a frame: each is the sum of its parts and a constant."""
    left, place = iter(parts), block.place
    for name, vector in place.work.vectors:
        loaded = []
        for row in vector.rows:
            array = next(left)
            batch, frames, height, width = array.shape
            line = (example % batch * frames + frame % frames) * height + row
            loaded.append(place.load(array, line * width, width < place.work.channels))
        whole = each(lambda *x: total(list(x)), *loaded)
        for into, numbers in zip(block.vectors[name], whole, strict=True):
            numbers = [x + vector.constant for x in numbers] if vector.constant else numbers
            if isinstance(into, Slots):
                into.write(numbers)
            else:
                for i, x in enumerate(numbers):
                    into[i] = x


class RowKernel:
    """The common part of the forward and the backward kernel."""

    def __init__(self, launch: RowLaunch) -> None:
        self.launch, self.work = launch, launch.work

    def options(self, rows: Any, stream: Any) -> dict[str, Any]:
        batch, length, _ = rows.shape
        return {
            "grid": [cutlass.min(batch * length, self.launch.blocks), 1, 1],
            "block": [self.work.threads, 1, 1],
            "stream": stream,
            "min_blocks_per_mp": self.launch.per_sm,  # limits the registers of a thread
            "preferred_smem_carveout": CARVEOUT,
        }

    def begin(self, place: Place, sources: list[Any], rows: Any) -> Block:
        """Return a thread's state before its block's first row."""
        work, blocks = self.work, cute.arch.grid_dim()[0]
        tokens, number = rows.shape[0] * rows.shape[1], cute.arch.block_idx()[0]
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
    """Norm and rotate rows; if there are two arrays of rows, add the second to the first before."""

    @cute.jit
    def __call__(self, rows: Any, parts: Any, tables: Any, results: Any, stream: Any) -> None:
        """Launch the kernel; arguments as for `call.forward`."""
        work = self.kernel(rows, parts, tables, results)
        work.launch(**self.options(rows[0], stream))

    @cute.kernel
    def kernel(self, rows: Any, parts: Any, tables: Any, results: Any) -> None:
        """Compute the block's rows, frame by frame."""
        place: Any = Place(self.work, cute.arch.thread_idx()[0])
        early, late = self.sources(place, rows, tables)
        block = self.begin(place, early, rows[0])
        if cutlass.const_expr(self.all_rows_share(parts)):
            hold(block, parts, 0, 0)
            for row in cutlass.range(block.first, block.last):
                self.take(block, row, late, results)
        else:
            frames = cutlass.Int32(1)
            for part in parts:
                frames = cutlass.max(frames, part.shape[1])
            span = rows[0].shape[1] // frames
            for group in cutlass.range(block.first // span, (block.last - 1) // span + 1):
                hold(block, parts, group // frames, group % frames)
                first = cutlass.max(block.first, group * span)
                last = cutlass.min(block.last, (group + 1) * span)
                for row in cutlass.range(first, last):
                    self.take(block, row, late, results)

    def all_rows_share(self, parts: Any) -> bool:
        """Check whether all rows are known, at compile time, to share their vectors."""
        return all(isinstance(n, int) and n == 1 for part in parts for n in part.shape[:2])

    def sources(self, place: Place, rows: Any, tables: Any) -> tuple[list[Any], list[Any]]:
        """Return the sources that are copied ahead, and those that are loaded with their row.

        With a norm across heads, angles arrive while the block sums the row.
        """
        of_all, turns = [of_rows(place, x) for x in rows], [of_angles(place, t) for t in tables]
        return (of_all, turns) if self.work.norm == "across" else (of_all + turns, [])

    def take(self, block: Block, row: Any, late: Any, results: Any) -> None:
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
        block.place.store(y, row, rotated(self.work.style, u, *angles))


class Backward(RowKernel):
    """Compute the gradients of rows, and sum those of bias and scale."""

    @cute.jit
    def __call__(
        self, rows: Any, kept: Any, parts: Any, tables: Any, dx: Any, sums: Any, stream: Any
    ) -> None:
        """Launch the kernel; arguments as for `call.backward`, with sums [blocks, 1, N H]."""
        work = self.kernel(rows, kept, parts, tables, dx, sums)
        work.launch(**self.options(dx, stream))

    @cute.kernel
    def kernel(self, rows: Any, kept: Any, parts: Any, tables: Any, dx: Any, sums: Any) -> None:
        """Compute the block's rows, then store its sums."""
        place: Any = Place(self.work, cute.arch.thread_idx()[0])
        sources = [of_rows(place, each) for each in rows]
        sources += [of_angles(place, each) for each in tables]
        sources += [of_numbers(each) for each in kept]
        block = self.begin(place, sources, dx)
        hold(block, parts, 0, 0)
        added: dict[str, list[Any]] = {}
        for name, _ in self.work.vectors:
            added[name] = [new_registers(OCTET, cutlass.Float32) for _ in range(self.work.passes)]
            for registers in added[name]:
                registers.fill(0.0)
        for row in cutlass.range(block.first, block.last):
            self.take(block, row, added, dx)
        for (name, _), into in zip(self.work.vectors, sums, strict=True):
            found = [[registers[i] for i in range(OCTET)] for registers in added[name]]
            place.store(into, cute.arch.block_idx()[0], found)

    def take(self, block: Block, row: Any, added: Any, dx: Any) -> None:
        """Differentiate z = x + bias, y = rotate(z r scale), and add to the sums of the vectors."""
        dy, x, *more = block.next(row)
        turns, kept = (more[:2], more[2:]) if self.work.style else ([], more)
        z = plus(block.as_row(x), block.vector("bias"))
        angles = [turns[0][0], [-a for a in turns[1][0]]] if turns else []
        du = rotated(self.work.style, block.as_row(dy), *angles)
        roots = None
        if self.work.norm is not None:
            roots = [[r[0][0]] * OCTET for r in kept] * self.work.passes
            roots = roots or over_roots(block, z, row)
        # Before the sum over threads, so that `du` needs no registers during it.
        add_to(added.get("scale"), times(each(mul, du, z), roots))
        dz = times(du, block.vector("scale"))
        if roots is not None:
            # (g - z mean(g z) r^2) r
            slopes = [
                [m[0] * r[0] * r[0]] * OCTET
                for m, r in zip(means(block, dz, z, row), roots, strict=True)
            ]
            dz = each(lambda g, v, slope, r: (g - v * slope) * r, dz, z, slopes, roots)
        block.place.store(dx, row, dz)
        add_to(added.get("bias"), dz)


def add_to(sums: list[Any] | None, row: Row) -> None:
    """Add a row to the sums of a vector; None for no such vector."""
    for registers, numbers in zip(sums or (), row, strict=False):
        for i, x in enumerate(numbers):
            registers[i] = registers[i] + x


# ---- calls ---------------------------------------------------------------------------------------


def run_forward(stream: Any, launch: Any, *operands: Any) -> None:
    rows, parts, tables, *results = operands
    Forward(launch)(rows, parts, tables, results, stream)


def run_backward(stream: Any, launch: Any, *operands: Any) -> None:
    rows, kept, parts, tables, dx, *sums = operands
    Backward(launch)(rows, kept, parts, tables, dx, sums, stream)
