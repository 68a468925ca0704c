"""Zig-zag: rank i of a ring of n has chunks i and 2n-1-i of the sequence, to balance causal work.

In contiguous order the last rank sees all keys, the first rank only its own, and every rank waits
for the last. With an early and a late chunk, every rank has equal work in every hop: two of its
four pairs (query chunk, key chunk) are empty. `ChunkLayout` assigns chunks to ranks.
`ChunkOrder` moves arrays between the two orders inside `shard_map`, by two permutes per array.

Source: Zhu, zigzag ring attention (github.com/zhuzilin/ring-flash-attention); Brandon et al.,
Striped Attention (arXiv 2311.09431), which balances the work token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import and_
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.call import Call
from maxattn.context_parallel.base import CONTEXT, FLOAT, Collective, array_bytes, bias_letters
from maxattn.kernels.bias_level import level_shape
from maxattn.masks import EMPTY, FULL, Full, Mask
from maxattn.masks.blocks import stretches
from maxattn.sharding import ways

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

MOST_WEIGHED = 256  # most ranks whose work is counted one by one: thousands take seconds


@dataclass(frozen=True)
class ChunkLayout:
    """Which chunks of the sequence each rank of a ring has."""

    ring_size: int  # ranks of the ring, n
    chunks_per_rank: int  # if 1, rank i has chunk i of n; if 2, chunks i and 2n-1-i of 2n

    @property
    def chunks(self) -> int:
        return self.ring_size * self.chunks_per_rank

    def chunk(self, rank: Any, i: int) -> Any:
        """Return the number in the sequence of a rank's chunk i, 0 or 1; ranks may be traced."""
        return rank if i == 0 else self.chunks - 1 - rank

    def empty(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Return whether each piece [rank, hop, query chunk, key chunk] has no allowed pair."""
        return self._blocks(mask, q_len, kv_len) == EMPTY

    def full(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Return whether masks of positions allow all pairs of each piece, shaped as in `empty`."""
        positions = joined(term for term in mask.terms() if not term.has_data)
        return self._blocks(positions, q_len, kv_len) == FULL

    def _blocks(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        n, c, each = self.ring_size, self.chunks, self.chunks_per_rank
        rank, hop, i, j = np.ogrid[:n, :n, :each, :each]
        chunks = np.stack([np.arange(n), c - 1 - np.arange(n)])
        blocks = mask.block_map(q_len // c, kv_len // c, q_len, kv_len)
        return blocks[chunks[i, rank], chunks[j, (rank - hop) % n]]

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List hop 0 and the hops in which some rank has allowed pairs."""
        change = np.zeros(self.ring_size + 1, np.int64)
        for _, start, end, _ in self._visits(mask, q_len, kv_len):
            np.add.at(change, start, 1)
            np.add.at(change, end, -1)
        is_made = np.cumsum(change) > 0
        is_made[0] = True
        return tuple(np.flatnonzero(is_made).tolist())

    def work(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Return the number of allowed pairs [rank, hop]; for data masks, an upper bound."""
        change = np.zeros((self.ring_size, self.ring_size + 1), np.int64)
        for rank, start, end, pairs in self._visits(mask, q_len, kv_len):
            np.add.at(change, (rank, start), pairs)
            np.add.at(change, (rank, end), -pairs)
        return np.cumsum(change, axis=1, out=change)[:, :-1]

    def slowest(self, mask: Mask, q_len: int, kv_len: int) -> tuple[np.ndarray, float]:
        """Return the pairs of the slowest rank in each hop, and the pairs of all ranks and hops."""
        n = self.ring_size
        if mask.is_full:
            return np.full(n, q_len * kv_len / n**2), q_len * kv_len
        least = -(-n // MOST_WEIGHED)
        many = next((m for m in range(least, n) if n % m == 0), 1)
        work = ChunkLayout(n // many, self.chunks_per_rank).work(mask, q_len, kv_len)
        return np.repeat(work.max(axis=0) / many**2, many), float(work.sum())

    def _visits(self, mask: Mask, q_len: int, kv_len: int) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield ranges of hops with allowed pairs: (ranks, first hops, stops, pairs per hop)."""
        n, c = self.ring_size, self.chunks
        found = stretches(mask, q_len // c, kv_len // c, q_len, kv_len)
        row, start, end = found.row, found.start, found.end
        rank, late = np.where(row < n, row, c - 1 - row), np.maximum(start, n)
        # For early chunks the rank rises with the chunk, for late chunks it falls.
        for low, high in ((start, np.minimum(end, n)), (c - end, c - late)):
            first = (rank - high + 1) % n
            last = first + high - low
            for begin, stop in ((first, np.minimum(last, n)), (0 * first, last - n)):
                some = (low < high) & (begin < stop)
                yield tuple(x[some] for x in (rank, begin, stop, found.pairs))


def joined(terms: Iterable[Mask]) -> Mask:
    """Return the mask that allows a pair if all terms allow it."""
    return reduce(and_, terms, Full())


@dataclass(frozen=True)
class ChunkOrder:
    """Move shards between the contiguous order and a layout's chunks, on the traced `rank`."""

    layout: ChunkLayout
    group: int
    rank: Any

    def to_zigzag(self, x: Array, axis: int) -> list[Array]:
        """Return this rank's chunks of an array whose shards are in contiguous order."""
        if self.layout.chunks_per_rank == 1:
            return [x]
        halves = zip(jnp.split(x, 2, axis), map(self._moves, (0, 1)), strict=True)
        return list(self._by_parity(*(jax.lax.ppermute(y, CONTEXT, m) for y, m in halves)))

    def from_zigzag(self, chunks: list[Array], axis: int) -> Array:
        """Turn the chunks of this rank into its contiguous shard: undo `to_zigzag`."""
        if self.layout.chunks_per_rank == 1:
            return chunks[0]
        back = [[(b, a) for a, b in self._moves(half)] for half in (0, 1)]
        halves = zip(self._by_parity(*chunks), back, strict=True)
        return jnp.concatenate([jax.lax.ppermute(y, CONTEXT, m) for y, m in halves], axis)

    def _moves(self, half: int) -> list[tuple[int, int]]:
        """List (from, to) for every device, for the first or second half of each shard.

        Chunk 2i + half is on rank i in contiguous order, and moves to its rank in zig-zag order.
        """
        n, group = self.layout.ring_size, self.group
        chunks = [(rank, 2 * rank + half) for rank in range(n)]
        to = [(rank, c if c < n else 2 * n - 1 - c) for rank, c in chunks]
        return [(a * group + u, b * group + u) for a, b in to for u in range(group)]

    def _by_parity(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Swap a and b on odd ranks, whose early chunk is odd: the second half of a shard."""
        even = self.rank % 2 == 0
        return jnp.where(even, a, b), jnp.where(even, b, a)


# ---- what `explain` prints -----------------------------------------------------------------------


def zigzag_collectives(ring: Ring, call: Call) -> tuple[Collective, ...]:
    """List the permutes of a padded global call: two for every array, one for each half."""
    parts = {"T": ring.ring_size, "B": ways("B", ring.shape), "N": ring.head_ways()}

    def elements(sizes: tuple[int, ...], letters: str) -> int:
        """Return the number of elements of an array's shard; 0 if it has no query axis."""
        split = zip(sizes, letters, strict=True)
        return "T" in letters and prod(-(-n // parts.get(letter, 1)) for n, letter in split)

    sizes = array_bytes(ring.rank_call(call))
    extra: list[tuple[str, int]] = []
    if call.bias is not None:
        # A call does not know the dtype of its bias, whose gradient and level are float32.
        shapes = call.bias, level_shape(call.bias, call.mask, call.q_len)
        both = zip(("bias", "bias level"), shapes, strict=True)
        extra = [(name, FLOAT * elements(x, bias_letters(x))) for name, x in both]
    leaves = zip(jax.tree.leaves(call.mask), jax.tree.leaves(call.mask.leaf_axes()), strict=True)
    extra += [("mask", elements(x.shape, axes) * x.dtype.itemsize) for x, axes in leaves]
    extra = [(name, size) for name, size in extra if size]

    def permute(what: str, way: str, when: str, more: list[tuple[str, int]]) -> Collective:
        moved = [*((name, sizes[name]) for name in what.split(",")), *more]
        names, received = (
            ",".join(dict.fromkeys(name for name, _ in moved)),
            sum(n for _, n in moved),
        )
        return Collective(
            "ppermute", (CONTEXT,), f"{names} {way} zig-zag", when, received, 2, len(moved)
        )

    return (
        permute("Q,K,V", "to", "forward", extra),
        permute("out,LSE", "from", "forward", []),
        permute("Q,K,V,out,dout,LSE,dLSE", "to", "backward", extra),
        permute(
            "dQ,dK,dV", "from", "backward", [("dbias", n) for name, n in extra if name == "bias"]
        ),
    )
