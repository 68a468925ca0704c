"""The CuTe kernels of norm and rotary embedding: what the threads of a block do to its rows.

`cute_threads.py` says which channels are a thread's, and `cute_memory.py` moves them. The formulas
are those of `triton.py`; all arithmetic is float32. A block takes one row after another, and loads
the next while it computes one.

CuTe comes with fa4-jax: this file is imported where a kernel is compiled.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from maxattn.modules.norm_rope.cute_memory import (
    Place,
    Raw,
    load_angles,
    load_row,
    load_vector,
    new_angles,
    new_row,
    pairs_of,
    store_head,
    values,
    zeros,
)
from maxattn.modules.norm_rope.cute_steps import (
    Pair,
    add_to,
    less,
    plus,
    product,
    rotated,
    scaled,
    times,
    total,
)
from maxattn.modules.norm_rope.cute_threads import WARP, CuteThreads

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")


class Block(NamedTuple):
    """Hold what a thread keeps from row to row.

    Args:
        place: where its channels are.
        held: bias and scale, those that there are, as they stand in memory.
        angles: cosines and sines of a row.
        shared: [2, warps], in which warps leave their sums; None where there is one.
        first, step: the block's first row, and how far it is to its next.
        rounds: how many rows it has.
        tokens: rows of all blocks.
    """

    place: Place
    held: dict[str, list[Raw]]
    angles: list[Any]
    shared: Any
    first: Any
    step: Any
    rounds: Any
    tokens: Any

    @property
    def threads(self) -> CuteThreads:
        """Return how a row is shared."""
        return self.place.threads

    def next(self, token: Any) -> Any:
        """Return the block's row after one; the last of all where there is none."""
        return cutlass.min(token + self.step, self.tokens - 1)

    def vector(self, name: str) -> list[Pair] | None:
        """Return bias or scale as pairs, pass by pass."""
        raw = self.held.get(name)
        return None if raw is None else [pairs_of(self.place, each) for each in raw]

    def turns(self, back: bool = False) -> list[list[Any]]:
        """Return cosines and sines of a row, of the way back with `back`; nothing without."""
        found = [values(each) for each in self.angles]
        return [found[0], [-x for x in found[1]]] if found and back else found


def begin(threads: CuteThreads, names: tuple[str, ...], vectors: Any, tokens: Any) -> Block:
    """Return what a thread keeps, before its block's first row."""
    place = Place(threads, cute.arch.thread_idx()[0])
    first, step = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    held = {name: load_vector(place, v) for name, v in zip(names, vectors, strict=True)}
    shared = None
    if threads.norm == "across" and threads.warps > 1:
        layout = cute.make_layout((2, threads.warps), stride=(threads.warps, 1))
        memory = import_module("cutlass.utils").SmemAllocator()
        shared = memory.allocate_tensor(cutlass.Float32, layout, 16)
    rounds = (tokens - first + step - 1) // step
    return Block(place, held, new_angles(place), shared, first, step, rounds, tokens)


class Forward:
    """Norm and rotate rows.

    Args:
        threads: that share a row.
        names: of the vectors, "bias" and "scale".
    """

    def __init__(self, threads: CuteThreads, names: tuple[str, ...]) -> None:
        self.threads, self.names = threads, names

    @cute.jit
    def __call__(self, x: Any, vectors: Any, tables: Any, y: Any, r: Any, stream: Any) -> None:
        """Launch it; r is where 1 / root goes, in a list, or nothing."""
        grid = [cutlass.min(x.shape[0], self.threads.blocks), 1, 1]
        block = [self.threads.threads, 1, 1]
        self.kernel(x, vectors, tables, y, r).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, x: Any, vectors: Any, tables: Any, y: Any, r: Any) -> None:
        """Take the block's rows."""
        block = begin(self.threads, self.names, vectors, x.shape[0])
        ahead = new_row(block.place, x)
        load_row(block.place, x, block.first, ahead)
        for i in cutlass.range(block.rounds):
            self.take(block, i, ahead, x, tables, y, r)

    def take(
        self, block: Block, i: Any, ahead: list[Raw], x: Any, tables: Any, y: Any, r: Any
    ) -> None:
        """Compute the row that was loaded, and load the next."""
        token = block.first + i * block.step
        load_angles(block.place, tables, token, block.angles)
        z = plus([pairs_of(block.place, raw) for raw in ahead], block.vector("bias"))
        load_row(block.place, x, block.next(token), ahead)
        roots = _over_roots(block, z, i)
        for each in r:
            each[token] = roots[0]
        u = times(scaled(z, roots), block.vector("scale"))
        for step, pair in enumerate(rotated(u, *block.turns())):
            store_head(block.place, y, token, step, pair)


class Backward:
    """Take gradients of rows back, and add up those of the vectors; arguments as for `Forward`."""

    def __init__(self, threads: CuteThreads, names: tuple[str, ...]) -> None:
        self.threads, self.names = threads, names

    @cute.jit
    def __call__(
        self, rows: Any, kept: Any, vectors: Any, tables: Any, dx: Any, sums: Any, stream: Any
    ) -> None:
        """Launch it; `rows` are dy and x, `kept` is r in a list, or nothing."""
        grid = [cutlass.min(dx.shape[0], self.threads.blocks), 1, 1]
        block = [self.threads.threads, 1, 1]
        work = self.kernel(rows, kept, vectors, tables, dx, sums)
        work.launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, rows: Any, kept: Any, vectors: Any, tables: Any, dx: Any, sums: Any) -> None:
        """Take the block's rows, then store its sums."""
        block = begin(self.threads, self.names, vectors, dx.shape[0])
        ahead = self.load_first(block, rows)
        added = self.no_sums(block)
        for i in cutlass.range(block.rounds):
            self.take(block, i, ahead, added, rows, kept, tables, dx)
        self.store_sums(block, added, sums)

    def load_first(self, block: Block, rows: Any) -> list[list[Raw]]:
        """Load the block's first row of dy and of x."""
        ahead = [new_row(block.place, each) for each in rows]
        for each, raw in zip(rows, ahead, strict=True):
            load_row(block.place, each, block.first, raw)
        return ahead

    def no_sums(self, block: Block) -> dict[str, list[list[Any]]]:
        """Return zeros to add to, for each vector."""
        return {name: zeros(block.place) for name in self.names}

    def take(
        self,
        block: Block,
        i: Any,
        ahead: Any,
        added: Any,
        rows: Any,
        kept: Any,
        tables: Any,
        dx: Any,
    ) -> None:
        """Compute the row that was loaded, and load the next."""
        token = block.first + i * block.step
        load_angles(block.place, tables, token, block.angles)
        dy, x = ([pairs_of(block.place, raw) for raw in each] for each in ahead)
        for each, raw in zip(rows, ahead, strict=True):
            load_row(block.place, each, block.next(token), raw)
        z, du = plus(x, block.vector("bias")), rotated(dy, *block.turns(back=True))
        g = times(du, block.vector("scale"))
        roots = [each[token] for each in kept] * block.threads.passes or _over_roots(block, z, i)
        found = {"bias": _through_norm(block, g, z, roots, i)}
        found["scale"] = scaled([product(*each) for each in zip(du, z, strict=True)], roots)
        for step, pair in enumerate(found["bias"]):
            store_head(block.place, dx, token, step, pair)
        for name, sums in added.items():
            add_to(sums, found[name])

    def store_sums(self, block: Block, added: Any, sums: Any) -> None:
        """Store the block's sums: [blocks,N,H] of each vector."""
        for name, into in zip(self.names, sums, strict=True):
            for step, (first, second) in enumerate(added[name]):
                pair = values(first), values(second)
                store_head(block.place, into, block.first, step, pair)


# ---- sums over threads ---------------------------------------------------------------------------


def _over_roots(block: Block, z: list[Pair], i: Any) -> list[Any]:
    """Return r, by which the norm multiplies each head; nothing without a norm."""
    if block.threads.norm is None:
        return []
    means = _means(block, z, z, i)
    return [cute.math.rsqrt(m + block.threads.eps, fastmath=True) for m in means]


def _through_norm(
    block: Block, g: list[Pair], z: list[Pair], roots: list[Any], i: Any
) -> list[Pair]:
    """Return dz = (g - z mean(g z) r^2) r."""
    if block.threads.norm is None:
        return g
    means = _means(block, g, z, i)
    slopes = [mean * r * r for mean, r in zip(means, roots, strict=True)]
    parts = zip(g, z, slopes, roots, strict=True)
    return [less(each, other, slope, r) for each, other, slope, r in parts]


def _means(block: Block, x: list[Pair], y: list[Pair], i: Any) -> list[Any]:
    """Return the mean of x * y over each head, or over the row: one for each pass."""
    threads, place = block.threads, block.place
    products = [product(*each) for each in zip(x, y, strict=True)]
    sums = [place.counted(step, total([*a, *b])) for step, (a, b) in enumerate(products)]
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
