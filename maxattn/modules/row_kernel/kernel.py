"""The row kernel. All arithmetic is float32.

A thread block computes consecutive rows, one after another. Rows of a frame share their vectors,
which the block loads once per frame. CuTe is installed with fa4-jax, so this file is imported only
when a kernel is compiled.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

from maxattn.modules.row_kernel.thread import (
    Place,
    Row,
    Stages,
    each,
    layer_normed,
    new_registers,
    of_angles,
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
    """State that a thread keeps between rows."""

    place: Place
    shared: Any  # [2, 2, warps]: the sums of each warp
    count: Any  # the number of channels that belong to the thread's warp
    vectors: dict[str, list[Any]]  # registers of each pass
    first: Any  # the block's first row
    last: Any  # the row after the block's last row
    stages: Stages

    def next(self, row: Any) -> list[Any]:
        """Return the row's numbers from each source, and start to copy a later row."""
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
        return [[registers[i] for i in range(OCTET)] for registers in self.vectors[name]]


def load_vectors(block: Block, parts: Any, example: Any, frame: Any) -> None:
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
            for i, x in enumerate(numbers):
                into[i] = x


class RowKernel:
    """Normalise and rotate rows; if there are two arrays of rows, first add them."""

    def __init__(self, launch: RowLaunch) -> None:
        self.launch, self.work = launch, launch.work

    @cute.jit
    def __call__(self, rows: Any, parts: Any, tables: Any, results: Any, stream: Any) -> None:
        """Launch the kernel; arguments as for `call.norm_rows`."""
        batch, length, _ = rows[0].shape
        self.kernel(rows, parts, tables, results).launch(
            grid=[cutlass.min(batch * length, self.launch.blocks), 1, 1],
            block=[self.work.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.launch.per_sm,  # limits the registers of a thread
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, rows: Any, parts: Any, tables: Any, results: Any) -> None:
        """Compute the block's rows, frame by frame."""
        place: Any = Place(self.work, cute.arch.thread_idx()[0])
        early, late = self.sources(place, rows, tables)
        block = self.begin(place, early, rows[0])
        # Whether all rows are known, at compile time, to share their vectors.
        alone = all(isinstance(n, int) and n == 1 for part in parts for n in part.shape[:2])
        if cutlass.const_expr(alone):
            load_vectors(block, parts, 0, 0)
            for row in cutlass.range(block.first, block.last):
                self.compute(block, row, late, results)
        else:
            frames = cutlass.Int32(1)
            for part in parts:
                frames = cutlass.max(frames, part.shape[1])
            span = rows[0].shape[1] // frames
            for group in cutlass.range(block.first // span, (block.last - 1) // span + 1):
                load_vectors(block, parts, group // frames, group % frames)
                first = cutlass.max(block.first, group * span)
                last = cutlass.min(block.last, (group + 1) * span)
                for row in cutlass.range(first, last):
                    self.compute(block, row, late, results)

    def sources(self, place: Place, rows: Any, tables: Any) -> tuple[list[Any], list[Any]]:
        """Return sources of rows and angles, loaded ahead, or angles while the norm sums a row."""
        of_all, turns = [of_rows(place, x) for x in rows], [of_angles(place, t) for t in tables]
        return (of_all, turns) if self.work.norm == "across" else (of_all + turns, [])

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
        registers = partial(new_registers, OCTET, cutlass.Float32)
        vectors = {name: [registers() for _ in range(work.passes)] for name, _ in work.vectors}
        stages = Stages(place, sources, self.launch.stages)
        for i in range(stages.depth - 1):
            stages.start(cutlass.min(first + i, last - 1), i)
        return Block(place, shared, count, vectors, first, last, stages)

    def compute(self, block: Block, row: Any, late: Any, results: Any) -> None:
        arriving = [each.read(row)[0] for each in late]
        found = block.next(row)
        arrays = len(found) if late else len(found) - (2 if self.work.style else 0)
        *before, x = [block.as_row(parts) for parts in found[:arrays]]
        angles = arriving or [parts[0] for parts in found[arrays:]]
        z = times(plus(x, block.vector("bias")), block.vector("gate"))
        for other in before:
            z = block.place.store(results[1], row, plus(other, z))
        if self.work.norm == "layer":
            z = layer_normed(block, z, row)
        elif self.work.norm is not None:
            z = times(z, over_roots(block, z, row))
        z = plus(times(z, block.vector("scale")), block.vector("shift"))
        block.place.store(results[0], row, rotated(self.work.style, z, *angles))


def run(stream: Any, launch: Any, *operands: Any) -> None:
    """Launch the kernel; cutejax calls this function while it compiles the call."""
    rows, parts, tables, *results = operands
    RowKernel(launch)(rows, parts, tables, results, stream)
