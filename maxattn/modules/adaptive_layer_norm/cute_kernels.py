"""The CuTe kernel of the adaptive norm: what the threads of a block do to its rows.

`threads.py` says which channels are a thread's. All arithmetic is float32. A block takes
neighbouring rows, one after another: they mostly share their vectors, which stay in registers until
a row has others.

CuTe comes with fa4-jax: this file is imported where a kernel is compiled.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from maxattn.modules.adaptive_layer_norm.cute_moments import Moments, over_block
from maxattn.modules.adaptive_layer_norm.threads import OCTET, STAGES, NormLaunch, NormThreads
from maxattn.modules.norm_rope.cute_memory import load, new_registers, values, vector
from maxattn.modules.norm_rope.cute_stages import RowSource, Stages
from maxattn.modules.norm_rope.cute_steps import total

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

CARVEOUT = 100  # percent of what shared memory can have of the first-level cache
Rows = list[list[Any]]
"""A thread's channels of a row in float32, pass by pass."""


class Octets:
    """Say where a thread's channels are.

    Args:
        threads: that share a row.
        index: of the thread in its block.
    """

    def __init__(self, threads: NormThreads, index: Any) -> None:
        self.threads, self.index = threads, index
        self.shared = import_module("cutlass.utils").SmemAllocator()

    def octet(self, step: int) -> Any:
        """Return the thread's first channel of a pass."""
        threads = self.threads
        octet = self.index + step * threads.threads
        if (step + 1) * threads.threads > threads.octets:
            octet = cutlass.min(octet, cutlass.Int32(threads.octets - 1))
        return octet * OCTET

    def row(self, rows: Any, number: Any) -> list[Any]:
        """Return where the thread's channels of a row of D numbers begin, pass by pass."""
        # There may be more than 2**31 numbers before it.
        start = rows.iterator + cutlass.Int64(number) * self.threads.channels
        return [start + self.octet(step) for step in range(self.threads.passes)]

    def store(self, into: Any, number: Any, row: Rows) -> Rows:
        """Store a row, and return it as it was rounded."""
        rounded = []
        for first, numbers in zip(self.row(into, number), row, strict=True):
            exact, kept = (new_registers(OCTET, k) for k in (cutlass.Float32, into.element_type))
            for i, x in enumerate(numbers):
                exact[i] = x
            kept.store(exact.load().to(into.element_type))
            cute.autovec_copy(kept, vector(first, OCTET, into.element_type))
            rounded.append(values(kept))
        return rounded


class RowBlock(NamedTuple):
    """Hold what a thread keeps from row to row.

    Args:
        place: where its channels are.
        moments: [2, 2, warps], in which warps leave mean and sum of squares; None for one warp.
        stages: how rows arrive.
        held: registers with the thread's channels of the vectors, by name, pass by pass.
        first, last: rows of the block: from the first to before the last.
    """

    place: Octets
    moments: Any
    stages: Stages
    held: dict[str, list[Any]]
    first: Any
    last: Any

    def start(self) -> None:
        """Start to copy the block's first rows."""
        for i in range(STAGES - 1):
            self.stages.start(self._or_last(self.first + i), i)

    def next(self, row: Any) -> list[Rows]:
        """Return a row's numbers, array by array, and start to copy one that comes later."""
        i, later = row - self.first, row + (STAGES - 1)
        found = self.stages.read(i % STAGES)
        self.stages.start(self._or_last(later), (i + (STAGES - 1)) % STAGES)
        return found

    def hold(self, name: str, parts: list[tuple[Any, Any]], constant: float) -> None:
        """Load a vector, the sum of its parts, to registers.

        Args:
            name: of the vector.
            parts: an array, and which of its rows of D numbers.
            constant: added to them.
        """
        lines = [(array, self.place.row(array, number)) for array, number in parts]
        for step, into in enumerate(self.held[name]):
            loaded = [values(load(line[step], OCTET, a.element_type)) for a, line in lines]
            for i, numbers in enumerate(zip(*loaded, strict=True)):
                into[i] = total(list(numbers)) + constant

    def vector(self, name: str) -> Rows | None:
        """Return what is held of a vector; None where there is none."""
        if name not in self.held:
            return None
        return [[registers[i] for i in range(OCTET)] for registers in self.held[name]]

    def _or_last(self, row: Any) -> Any:
        return cutlass.min(row, self.last - 1)


class AdaptiveNorm:
    """Norm rows, after adding a branch where there is one.

    Args:
        launch: how rows are shared.
    """

    def __init__(self, launch: NormLaunch) -> None:
        self.launch = launch

    @cute.jit
    def __call__(self, rows: Any, parts: Any, results: Any, stream: Any) -> None:
        """Launch it.

        Args:
            rows: x and the branch, [B, T, D].
            parts: of the vectors, in the order of `launch.vectors`: [B or 1, F or 1, R, D].
            results: the normed rows, and the sums before the norm where there is a branch.
            stream: to launch on.
        """
        work = self.kernel(rows, parts, results)
        work.launch(
            grid=[cutlass.min(rows[0].shape[0] * rows[0].shape[1], self.launch.blocks), 1, 1],
            block=[self.launch.threads.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.launch.per_sm,
            preferred_smem_carveout=CARVEOUT,
        )

    @cute.kernel
    def kernel(self, rows: Any, parts: Any, results: Any) -> None:
        """Take the block's rows, frame by frame."""
        block = self.begin(rows)
        block.start()
        frames = _most([part.shape[1] for part in parts])
        length = rows[0].shape[1] // frames
        for group in cutlass.range(block.first // length, (block.last - 1) // length + 1):
            self.hold(block, parts, group // frames, group % frames)
            first = cutlass.max(block.first, group * length)
            last = cutlass.min(block.last, (group + 1) * length)
            for row in cutlass.range(first, last):
                self.take(block, row, results)

    def hold(self, block: RowBlock, parts: Any, example: Any, frame: Any) -> None:
        """Load the vectors of a frame."""
        left = iter(parts)
        for name, each in self.launch.vectors:
            found = []
            for row in each.rows:
                array = next(left)
                batch, frames, height, _ = array.shape
                line = example % batch * frames + frame % frames
                found.append((array, line * height + row))
            block.hold(name, found, each.constant)

    def begin(self, rows: Any) -> RowBlock:
        """Return what a thread keeps, before its block's first row."""
        threads = self.launch.threads
        place: Any = Octets(threads, cute.arch.thread_idx()[0])
        tokens = rows[0].shape[0] * rows[0].shape[1]
        number, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        each, more = tokens // blocks, tokens % blocks
        first = number * each + cutlass.min(number, more)
        last = first + each + cutlass.select_(number < more, cutlass.Int32(1), cutlass.Int32(0))
        moments = None
        if threads.warps > 1:
            shape = (2, 2, threads.warps)
            layout = cute.make_layout(shape, stride=(2 * threads.warps, threads.warps, 1))
            moments = place.shared.allocate_tensor(cutlass.Float32, layout, 16)
        stages = Stages(place, [_source(place, each) for each in rows], STAGES)
        held = {
            name: [new_registers(OCTET, cutlass.Float32) for _ in range(threads.passes)]
            for name, _ in self.launch.vectors
        }
        return RowBlock(place, moments, stages, held, first, last)

    def take(self, block: RowBlock, number: Any, results: Any) -> None:
        """Compute a row."""
        x, *branch = block.next(number)
        for y in branch:
            y = _sum(y, block.vector("bias"))
            added = _sum(x, _product(y, block.vector("gate")))
            x = block.place.store(results[1], number, added)
        mine = Moments.of(block.place, x)
        found = over_block(block.place, mine, block.moments, number - block.first)
        root = cute.math.rsqrt(
            found.squares * (1.0 / block.place.threads.channels) + self.launch.eps, fastmath=True
        )
        normed = [[(v - found.mean) * root for v in each] for each in x]
        scaled = _product(normed, block.vector("scale"))
        block.place.store(results[0], number, _sum(scaled, block.vector("shift")))


def _source(place: Octets, rows: Any) -> RowSource:
    sizes = [OCTET] * place.threads.passes
    return RowSource(rows, sizes, lambda number: place.row(rows, number))


def _product(x: Rows, y: Rows | None) -> Rows:
    if y is None:
        return x
    return [[a * b for a, b in zip(*both, strict=True)] for both in zip(x, y, strict=True)]


def _sum(x: Rows, y: Rows | None) -> Rows:
    if y is None:
        return x
    return [[a + b for a, b in zip(*both, strict=True)] for both in zip(x, y, strict=True)]


def _most(numbers: list[Any]) -> Any:
    most = cutlass.Int32(1)
    for each in numbers:
        most = cutlass.max(most, each)
    return most
