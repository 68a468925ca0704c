"""Zig-zag: rank i of a ring of n holds chunks i and 2n-1-i of the sequence, to even causal work.

In contiguous order the last rank sees all keys and the first one only its own, and everybody waits
for the last. With two chunks, an early and a late one, every rank computes the same in every hop:
of the four pairs of (query chunk, key chunk) two are empty. `ChunkLayout` is the arithmetic.
`ChunkOrder` moves arrays from the contiguous order and back, inside `shard_map`: two permutes an
array and direction.

Source: Zhu, zigzag ring attention (github.com/zhuzilin/ring-flash-attention); Brandon et al.,
Striped Attention (arXiv 2311.09431), which evens the work token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.context_parallel.base import CONTEXT, Collective, bias_letters, itemsize, kv_bytes
from maxattn.kernels.bias_level import level_shape
from maxattn.masks import EMPTY, FULL, Full, Mask
from maxattn.masks.blocks import stretches
from maxattn.sharding import MeshShape, ways

MOST_WEIGHED = 256  # ranks: for thousands, counts of every chunk take seconds
Moves = list[tuple[int, int]]
"""(from, to) of a permute, by device."""


HopRange = tuple[np.ndarray, ...]
"""Ranks, and how many pairs each computes in every hop from the second array to the third."""


@dataclass(frozen=True)
class ChunkLayout:
    """Say which chunks of the sequence each rank of a ring holds.

    Args:
        ring_size: ranks of the ring, n.
        chunks_per_rank: 1, rank i holds chunk i of n; or 2, rank i holds chunks i and 2n-1-i of 2n.
    """

    ring_size: int
    chunks_per_rank: int

    @property
    def chunks(self) -> int:
        """Chunks of the sequence."""
        return self.ring_size * self.chunks_per_rank

    def chunk(self, rank: Any, i: int) -> Any:
        """Return the chunk that a rank (an int, numpy or traced) holds as its first or second."""
        return rank if i == 0 else self.chunks - 1 - rank

    def empty(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Say for [rank, hop, query chunk, key chunk] whether queries see no key."""
        c = self.chunks
        return self._by_hop(mask.block_map(q_len // c, kv_len // c, q_len, kv_len) == EMPTY)

    def full(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Say for [rank, hop, query chunk, key chunk] whether positions alone forbid nothing."""
        c = self.chunks
        positions = joined(term for term in mask.terms() if not term.has_data)
        return self._by_hop(positions.block_map(q_len // c, kv_len // c, q_len, kv_len) == FULL)

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List the hops in which some rank has something to compute; hop 0 is always made."""
        change = np.zeros(self.ring_size + 1, np.int64)
        for _, start, end, _ in self._visits(mask, q_len, kv_len):
            np.add.at(change, start, 1)
            np.add.at(change, end, -1)
        some = np.cumsum(change) > 0
        return tuple(h for h in range(self.ring_size) if h == 0 or some[h])

    def work(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Count allowed pairs for [rank, hop]; at most, with data masks."""
        change = np.zeros((self.ring_size, self.ring_size + 1), np.int64)
        for rank, start, end, pairs in self._visits(mask, q_len, kv_len):
            np.add.at(change, (rank, start), pairs)
            np.add.at(change, (rank, end), -pairs)
        return np.cumsum(change, axis=1, out=change)[:, :-1]

    def slowest(self, mask: Mask, q_len: int, kv_len: int) -> tuple[np.ndarray, float]:
        """Return the pairs of the slowest rank for each hop, and those of all ranks in all hops.

        Of many ranks they are estimated, from neighbours taken together.
        """
        n = self.ring_size
        if mask.is_full:
            return np.full(n, q_len * kv_len / n**2), q_len * kv_len
        least = -(-n // MOST_WEIGHED)
        many = next((m for m in range(least, n) if n % m == 0), 1)
        work = ChunkLayout(n // many, self.chunks_per_rank).work(mask, q_len, kv_len)
        return np.repeat(work.max(axis=0) / many**2, many), float(work.sum())

    def _visits(self, mask: Mask, q_len: int, kv_len: int) -> Iterator[HopRange]:
        """List in which hops ranks compute pairs: thousands of ranks have millions of chunks."""
        n, c = self.ring_size, self.chunks
        found = stretches(mask, q_len // c, kv_len // c, q_len, kv_len)
        row, start, end = found.row, found.start, found.end
        rank, late = np.where(row < n, row, c - 1 - row), np.maximum(start, n)
        # Ranks hold early chunks in rising order, and late ones in falling order.
        for low, high in ((start, np.minimum(end, n)), (c - end, c - late)):
            first = (rank - high + 1) % n
            last = first + high - low
            for begin, stop in ((first, np.minimum(last, n)), (0 * first, last - n)):
                some = (low < high) & (begin < stop)
                yield tuple(x[some] for x in (rank, begin, stop, found.pairs))

    def _by_hop(self, of_chunks: np.ndarray) -> np.ndarray:
        n, chunks = self.ring_size, self.chunks_per_rank
        rank, hop, i, j = np.ogrid[:n, :n, :chunks, :chunks]
        both = np.stack([np.arange(n), self.chunks - 1 - np.arange(n)])
        return of_chunks[both[i, rank], both[j, (rank - hop) % n]]


def joined(terms: Iterable[Mask]) -> Mask:
    """Return the mask that allows what all terms allow."""
    return reduce(and_, terms, Full())


@dataclass(frozen=True)
class ChunkOrder:
    """Move shards between the contiguous order and a layout's chunks.

    Args:
        layout: the ring's.
        axis: name of the mesh axis.
        group: neighbouring devices that are one rank.
        rank: this device's rank, traced.
    """

    layout: ChunkLayout
    axis: str
    group: int
    rank: Any

    def to_zigzag(self, x: Array, axis: int) -> list[Array]:
        """Split a shard in contiguous order into the chunks that this rank holds."""
        if self.layout.chunks_per_rank == 1:
            return [x]
        halves = zip(jnp.split(x, 2, axis), map(self._moves, (0, 1)), strict=True)
        return list(self._by_parity(*(jax.lax.ppermute(y, self.axis, m) for y, m in halves)))

    def from_zigzag(self, chunks: list[Array], axis: int) -> Array:
        """Join chunks to the shard that this device holds in contiguous order."""
        if self.layout.chunks_per_rank == 1:
            return chunks[0]
        back = [[(b, a) for a, b in self._moves(half)] for half in (0, 1)]
        halves = zip(self._by_parity(*chunks), back, strict=True)
        return jnp.concatenate([jax.lax.ppermute(y, self.axis, m) for y, m in halves], axis)

    def _moves(self, half: int) -> Moves:
        """List where the first or second halves of all shards go.

        Chunk 2i + half, of rank i in contiguous order, goes to the rank that holds it in zig-zag.
        """
        n, group = self.layout.ring_size, self.group
        chunks = [(rank, 2 * rank + half) for rank in range(n)]
        to = [(rank, c if c < n else 2 * n - 1 - c) for rank, c in chunks]
        return [(a * group + u, b * group + u) for a, b in to for u in range(group)]

    def _by_parity(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Swap on odd ranks: their early chunk is odd, so it was the second half of a shard."""
        even = self.rank % 2 == 0
        return jnp.where(even, a, b), jnp.where(even, b, a)


# ---- what `explain` prints -----------------------------------------------------------------------


def zigzag_collectives(
    call: Call, hop: Call, shape: MeshShape, ring_size: int, head_ways: int
) -> tuple[Collective, ...]:
    """Name the permutes to zig-zag and back: two for every array, each of half of it.

    Args:
        call: the global, padded call.
        hop: the call of one hop.
        shape: the mesh's axes.
        ring_size: ranks of the ring, which split the queries of masks and biases.
        head_ways: devices that split their heads.
    """
    parts = {"T": ring_size, "B": ways("B", shape), "N": head_ways}

    def elements(sizes: tuple[int, ...], letters: str) -> int:
        """Count the elements of a device's share of an array; 0 where it has no query axis."""
        split = zip(sizes, letters, strict=True)
        return "T" in letters and prod(-(-n // parts.get(letter, 1)) for n, letter in split)

    item, rows = itemsize(hop.dtype), hop.batch * hop.q_len * hop.heads
    q, out, lse = rows * hop.head_dim * item, rows * hop.value_dim * item, 4 * rows
    kv, bias, level = kv_bytes(hop, item), 0, 0
    if call.bias is not None:
        # A call does not know the dtype of its bias, whose gradient and level are float32.
        both = call.bias, level_shape(call.bias, call.mask, call.q_len)
        bias, level = (4 * elements(sizes, bias_letters(sizes)) for sizes in both)
    leaves, axes = jax.tree.leaves(call.mask), jax.tree.leaves(call.mask.leaf_axes())
    sizes = (elements(x.shape, a) * x.dtype.itemsize for x, a in zip(leaves, axes, strict=True))
    masks = [size for size in sizes if size]
    present = ("bias", bias), ("bias level", level), ("mask", masks)
    words = "".join(f",{word}" for word, size in present if size)
    extra, arrays = bias + level + sum(masks), bool(bias) + bool(level) + len(masks)
    moves = (
        (f"Q,K,V{words} to", "forward", q + kv + extra, 3 + arrays),
        ("out,LSE from", "forward", out + lse, 2),
        (
            f"Q,K,V,out,dout,LSE,dLSE{words} to", "backward",
            q + 2 * out + kv + 2 * lse + extra, 7 + arrays,
        ),
        (
            f"dQ,dK,dV{',dbias' if bias else ''} from", "backward",
            q + kv + bias, 3 + bool(bias),
        ),
    )  # fmt: skip
    return tuple(
        Collective("ppermute", (CONTEXT,), f"{what} zig-zag", when, size, 2, count)
        for what, when, size, count in moves
    )
