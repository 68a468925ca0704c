"""The CuTe kernels of norm and rotary embedding: what the threads of a block do to its rows.

`cute_threads.py` says which channels are a thread's, and `cute_stages.py` brings them. The formulas
are those of `triton.py`; all arithmetic is float32. A block takes one row after another.

CuTe comes with fa4-jax: this file is imported where a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from maxattn.modules.norm_rope.cute_launch import CuteLaunch
from maxattn.modules.norm_rope.cute_memory import (
    Kept,
    Place,
    keep_vector,
    pairs_of,
    store_head,
    values,
    vector_of,
    zeros,
)
from maxattn.modules.norm_rope.cute_stages import RowSource, Stages, of_angles, of_numbers, of_rows
from maxattn.modules.norm_rope.cute_steps import (
    Heads,
    add_to,
    less,
    plus,
    products,
    rotated,
    scaled,
    times,
    total,
)
from maxattn.modules.norm_rope.cute_threads import WARP, CuteThreads

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

CARVEOUT = 100  # percent of what shared memory can have of the first-level cache


class Block(NamedTuple):
    """Hold what a thread keeps from row to row.

    Args:
        place: where its channels are.
        held: bias and scale, those that there are.
        shared: [2, warps], in which warps leave their sums; None where there is one.
        first, step: the block's first row, and how far it is to its next.
        rounds: how many rows it has.
        tokens: rows of all blocks.
    """

    place: Place
    held: dict[str, Kept]
    shared: Any
    first: Any
    step: Any
    rounds: Any
    tokens: Any

    @property
    def threads(self) -> CuteThreads:
        """Return how a row is shared."""
        return self.place.threads

    def token(self, i: Any) -> Any:
        """Return the block's i-th row."""
        return self.first + i * self.step

    def vector(self, name: str) -> Heads | None:
        """Return bias or scale as pairs, pass by pass."""
        return vector_of(self.place, self.held[name]) if name in self.held else None

    def start(self, stages: Stages) -> Stages:
        """Start to copy the block's first rows."""
        for i in range(stages.depth - 1):
            stages.start(self._or_last(i), i)
        return stages

    def next(self, stages: Stages, i: Any) -> list[list[list[Any]]]:
        """Return what the i-th row needs, and start to copy one that comes later."""
        found, later = stages.read(i % stages.depth), i + stages.depth - 1
        stages.start(self._or_last(later), later % stages.depth)
        return found

    def heads(self, parts: list[list[Any]]) -> Heads:
        """Return a row as pairs, pass by pass."""
        n = len(parts) // self.threads.passes
        return [pairs_of(self.place, parts[k : k + n]) for k in range(0, len(parts), n)]

    def _or_last(self, i: Any) -> Any:
        """Return the block's i-th row, or the last of all where it has no so many."""
        return cutlass.min(self.token(i), self.tokens - 1)


def begin(
    kernel: Forward | Backward, vectors: Any, tokens: Any, where: str, shares: int = 1
) -> Block:
    """Return what a thread keeps, before its block's first row.

    Args:
        kernel: what runs.
        vectors: bias and scale.
        tokens: rows of all blocks.
        where: bias and scale stay.
        shares: of the launched blocks, each of which takes so many rows.
    """
    threads, names = kernel.launch.threads, kernel.names
    place = Place(threads, cute.arch.thread_idx()[0])
    step = cute.arch.grid_dim()[0] // shares
    first = cute.arch.block_idx()[0] % step
    held = {name: keep_vector(place, v, where) for name, v in zip(names, vectors, strict=True)}
    shared = None
    if threads.norm == "across" and threads.warps > 1:
        layout = cute.make_layout((2, threads.warps), stride=(threads.warps, 1))
        shared = place.shared.allocate_tensor(cutlass.Float32, layout, 16)
    rounds = (tokens - first + step - 1) // step
    return Block(place, held, shared, first, step, rounds, tokens)


def options(launch: CuteLaunch, tokens: Any, stream: Any) -> dict[str, Any]:
    """Return how a kernel is launched: with registers few enough that an SM holds its blocks."""
    return {
        "grid": [cutlass.min(tokens, launch.blocks), 1, 1],
        "block": [launch.threads.threads, 1, 1],
        "stream": stream,
        "min_blocks_per_mp": launch.per_sm,
        "preferred_smem_carveout": CARVEOUT,
    }


class Forward:
    """Norm and rotate rows.

    Args:
        launch: how rows are shared.
        names: of the vectors, "bias" and "scale".
        first: where an example's rows begin in a longer sequence, to which they are stored:
            [B, L, N, H]. Default: they are stored as they come, [M, N, H].
    """

    def __init__(
        self, launch: CuteLaunch, names: tuple[str, ...], first: int | None = None
    ) -> None:
        self.launch, self.names, self.first = launch, names, first

    @cute.jit
    def __call__(self, x: Any, vectors: Any, tables: Any, y: Any, r: Any, stream: Any) -> None:
        """Launch it; r is where 1 / root goes, in a list, or nothing."""
        work = self.kernel(x, vectors, tables, y, r)
        work.launch(**options(self.launch, x.shape[0], stream))

    @cute.kernel
    def kernel(self, x: Any, vectors: Any, tables: Any, y: Any, r: Any) -> None:
        """Take the block's rows."""
        block = begin(self, vectors, x.shape[0], "registers")
        self.rows(block, x, tables, y, r)

    @cute.jit
    def rows(self, block: Any, x: Any, tables: Any, y: Any, r: Any) -> None:
        """Take the rows of a block."""
        turns = [of_angles(block.place, each) for each in tables]
        stages = block.start(self.stages(block.place, of_rows(block.place, x), turns))
        for i in cutlass.range(block.rounds):
            self.take(block, i, stages, y, r)

    def place_of(self, block: Block, token: Any, y: Any) -> Any:
        """Return the row of y in which a token's is stored."""
        if self.first is None:
            return token
        batch, length, _, _ = y.shape
        own = block.tokens // batch
        return token // own * length + token % own + self.first

    def stages(self, place: Place, x: RowSource, turns: list[RowSource]) -> Stages:
        """Return how rows and angles arrive: these may do so while the block adds up a row."""
        if place.threads.norm == "across":
            return Stages(place, [x], self.launch.stages, late=turns)
        return Stages(place, [x, *turns], self.launch.stages)

    def take(self, block: Block, i: Any, stages: Stages, y: Any, r: Any) -> None:
        """Compute a row."""
        token = block.token(i)
        arriving = [each.read(token) for each in stages.late]
        x, *turns = block.next(stages, i)
        z = plus(block.heads(x), block.vector("bias"))
        roots = _over_roots(block, z, i)
        for each in r:
            each[token] = roots[0]
        u = times(scaled(z, roots), block.vector("scale"))
        angles, into = [parts[0] for parts in turns or arriving], self.place_of(block, token, y)
        for step, pair in enumerate(rotated(u, *angles)):
            store_head(block.place, y, into, step, pair)


class PairForward(Forward):
    """Norm and rotate the rows of queries and of keys: half of the blocks take each.

    Args:
        launch, names: as for `Forward`.
    """

    @cute.jit
    def __call__(self, both: Any, vectors: Any, tables: Any, results: Any, stream: Any) -> None:
        """Launch it; `both`, `results` and each of `vectors` are pairs."""
        work = self.kernel(both, vectors, tables, results)
        how = options(self.launch, both[0].shape[0], stream)
        half = cutlass.min(both[0].shape[0], max(1, self.launch.blocks // 2))
        work.launch(**(how | {"grid": [2 * half, 1, 1]}))

    @cute.kernel
    def kernel(self, both: Any, vectors: Any, tables: Any, results: Any) -> None:
        """Take the block's rows, of one or the other."""
        second = cute.arch.block_idx()[0] >= cute.arch.grid_dim()[0] // 2
        x, y = _one_of(both, second), _one_of(results, second)
        mine = [_one_of(each, second) for each in vectors]
        block = begin(self, mine, x.shape[0], "registers", shares=2)
        self.rows(block, x, tables, y, [])


class OneOfPair(NamedTuple):
    """Stand for one of two arrays of the same kind, which the block's number chooses."""

    iterator: Any
    element_type: Any
    shape: Any


def _one_of(pair: Any, second: Any) -> OneOfPair:
    one, other = pair
    start = cutlass.select_(second, other.iterator.toint(), one.iterator.toint())
    memory, kind = cute.AddressSpace.gmem, one.element_type
    return OneOfPair(cute.make_ptr(kind, start, memory, assumed_align=16), kind, one.shape)


class Backward:
    """Take gradients of rows back, and add up those of the vectors.

    Args:
        launch, names: as for `Forward`.
    """

    def __init__(self, launch: CuteLaunch, names: tuple[str, ...]) -> None:
        self.launch, self.names = launch, names

    @cute.jit
    def __call__(
        self, rows: Any, kept: Any, vectors: Any, tables: Any, dx: Any, sums: Any, stream: Any
    ) -> None:
        """Launch it; `rows` are dy and x, `kept` is r in a list, or nothing."""
        work = self.kernel(rows, kept, vectors, tables, dx, sums)
        work.launch(**options(self.launch, dx.shape[0], stream))

    @cute.kernel
    def kernel(self, rows: Any, kept: Any, vectors: Any, tables: Any, dx: Any, sums: Any) -> None:
        """Take the block's rows, then store its sums."""
        where = "shared" if self.launch.holds_vectors else "memory"
        block = begin(self, vectors, dx.shape[0], where)
        sources = [of_rows(block.place, each) for each in rows]
        sources += [of_angles(block.place, each) for each in tables]
        sources += [of_numbers(each) for each in kept]
        stages = block.start(Stages(block.place, sources, self.launch.stages))
        added = {name: zeros(block.place) for name in self.names}
        for i in cutlass.range(block.rounds):
            self.take(block, i, stages, added, dx)
        self.store_sums(block, added, sums)

    def take(self, block: Block, i: Any, stages: Stages, added: Any, dx: Any) -> None:
        """Compute a row."""
        token, (dy, x, *more) = block.token(i), block.next(stages, i)
        turns, kept = (more[:2], more[2:]) if block.threads.style else ([], more)
        z = plus(block.heads(x), block.vector("bias"))
        du = rotated(block.heads(dy), *_back([parts[0] for parts in turns]))
        roots = [r[0][0] for r in kept] * block.threads.passes or _over_roots(block, z, i)
        # Before the sum over threads, so that registers hold `du` no longer than that.
        self.add("scale", added, lambda: scaled(products(du, z), roots))
        dz = _through_norm(block, times(du, block.vector("scale")), z, roots, i)
        for step, pair in enumerate(dz):
            store_head(block.place, dx, token, step, pair)
        self.add("bias", added, lambda: dz)

    def add(self, name: str, added: Any, found: Callable[[], Heads]) -> None:
        """Add to the sums of a vector, where there is one."""
        if name in added:
            add_to(added[name], found())

    def store_sums(self, block: Block, added: Any, sums: Any) -> None:
        """Store the block's sums: [blocks,N,H] of each vector."""
        for name, into in zip(self.names, sums, strict=True):
            for step, (first, second) in enumerate(added[name]):
                pair = values(first), values(second)
                store_head(block.place, into, block.first, step, pair)


def _back(turns: list[Any]) -> list[list[Any]]:
    """Return cosines and sines of the way back; nothing without."""
    return [turns[0], [-x for x in turns[1]]] if turns else []


# ---- sums over threads ---------------------------------------------------------------------------


def _over_roots(block: Block, z: Heads, i: Any) -> list[Any]:
    """Return r, by which the norm multiplies each head; nothing without a norm."""
    if block.threads.norm is None:
        return []
    means = _means(block, z, z, i)
    return [cute.math.rsqrt(m + block.threads.eps, fastmath=True) for m in means]


def _through_norm(block: Block, g: Heads, z: Heads, roots: list[Any], i: Any) -> Heads:
    """Return dz = (g - z mean(g z) r^2) r."""
    if block.threads.norm is None:
        return g
    means = _means(block, g, z, i)
    slopes = [mean * r * r for mean, r in zip(means, roots, strict=True)]
    parts = zip(g, z, slopes, roots, strict=True)
    return [less(each, other, slope, r) for each, other, slope, r in parts]


def _means(block: Block, x: Heads, y: Heads, i: Any) -> list[Any]:
    """Return the mean of x * y over each head, or over the row: one for each pass."""
    threads, place = block.threads, block.place
    pairs = enumerate(products(x, y))
    sums = [place.counted(step, total([*a, *b])) for step, (a, b) in pairs]
    if threads.norm == "head":
        return [_over_lanes(each, threads.lanes) * (1.0 / threads.head_dim) for each in sums]
    whole = _over_block(block, total(sums), i) * (1.0 / (threads.heads * threads.head_dim))
    return [whole] * threads.passes


def _over_lanes(x: Any, width: int) -> Any:
    """Sum over so many neighbouring threads."""
    for step in range(width.bit_length() - 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << step)
    return x


def _over_block(block: Block, x: Any, i: Any) -> Any:
    """Sum over the block, once a row: rows take turns with two sets of sums, between barriers."""
    x = _over_lanes(x, WARP)
    if block.shared is None:
        return x
    turn = i % 2
    # All threads of a warp store the same.
    block.shared[turn, cute.arch.warp_idx()] = x
    cute.arch.sync_threads()
    return total([block.shared[turn, warp] for warp in range(block.threads.warps)])
