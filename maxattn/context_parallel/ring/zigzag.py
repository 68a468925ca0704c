"""Zig-zag: each place of a ring of n holds chunk i and chunk 2n-1-i of the sequence, so that causal
work is even.

In contiguous order the last place sees all keys and the first one only its own, and everybody waits
for the last. With two chunks, an early and a late one, every place computes the same in every hop:
of the four pairs of (query chunk, key chunk) two are empty. `Layout` is the arithmetic, `Deal`
moves arrays from the contiguous order and back, inside `shard_map`: two permutes an array and
direction.

Source: Zhu, zigzag ring attention (github.com/zhuzilin/ring-flash-attention); Brandon et al.,
Striped Attention (arXiv 2311.09431), which evens the work token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.masks import EMPTY, FULL, Full, Mask
from maxattn.masks.blocks import count


@dataclass(frozen=True)
class Layout:
    """Say which chunks of the sequence each place of a ring holds.

    Args:
        places: places of the ring, n.
        runs: 1, place i holds chunk i of n; or 2, place i holds chunks i and 2n-1-i of 2n.
    """

    places: int
    runs: int

    @property
    def chunks(self) -> int:
        """Chunks of the sequence."""
        return self.places * self.runs

    def chunk(self, place: Any, run: int) -> Any:
        """Return the chunk that a place (an int, numpy or traced) holds as its run 0 or 1."""
        return place if run == 0 else self.chunks - 1 - place

    def empty(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Say for [place, hop, query run, key run] whether the queries there see nothing of the
        keys of that hop.
        """
        c = self.chunks
        return self._by_hop(mask.block_map(q_len // c, kv_len // c, q_len, kv_len) == EMPTY)

    def full(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Say for [place, hop, query run, key run] whether positions alone forbid nothing."""
        c = self.chunks
        positions = joined(term for term in mask.terms() if not term.has_data)
        return self._by_hop(positions.block_map(q_len // c, kv_len // c, q_len, kv_len) == FULL)

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List the hops in which some place has something to compute; hop 0 is always made."""
        some = np.any(~self.empty(mask, q_len, kv_len), axis=(0, 2, 3))
        return tuple(h for h in range(self.places) if h == 0 or some[h])

    def work(self, mask: Mask, q_len: int, kv_len: int) -> np.ndarray:
        """Count the allowed pairs for [place, hop, query run, key run]; with data masks, an upper
        bound.
        """
        c = self.chunks
        return self._by_hop(count(mask, q_len // c, kv_len // c, q_len, kv_len))

    def _by_hop(self, of_chunks: np.ndarray) -> np.ndarray:
        n, runs = self.places, self.runs
        place, hop, i, j = np.mgrid[:n, :n, :runs, :runs]
        both = np.stack([np.arange(n), self.chunks - 1 - np.arange(n)])
        return of_chunks[both[i, place], both[j, (place - hop) % n]]


def joined(terms: Iterable[Mask]) -> Mask:
    """Allow what all terms allow."""
    return reduce(and_, terms, Full())


@dataclass(frozen=True)
class Deal:
    """Move arrays between the contiguous order and a layout's runs, each device its own shard.

    Args:
        layout: the ring's.
        axis: name of the mesh axis.
        inner: neighbouring devices that are one place.
        place: this device's place, traced.
    """

    layout: Layout
    axis: str
    inner: int
    place: Any

    def out(self, x: Array, axis: int) -> list[Array]:
        """Split a shard into this place's runs."""
        if self.layout.runs == 1:
            return [x]
        first, second = jnp.split(x, 2, axis)
        first, second = (
            jax.lax.ppermute(y, self.axis, self._moves(k)) for k, y in enumerate((first, second))
        )
        return list(self._by_parity(first, second))

    def back(self, runs: list[Array], axis: int) -> Array:
        """Join runs to the shard that this device holds in contiguous order."""
        if self.layout.runs == 1:
            return runs[0]
        halves = self._by_parity(*runs)
        home = [[(b, a) for a, b in self._moves(k)] for k in (0, 1)]
        return jnp.concatenate(
            [jax.lax.ppermute(y, self.axis, h) for y, h in zip(halves, home, strict=True)], axis
        )

    def _moves(self, half: int) -> list[tuple[int, int]]:
        """List where the first or second halves of all shards go: chunk 2i + half goes to the place
        that holds it.
        """
        n = self.layout.places
        chunks = [(place, 2 * place + half) for place in range(n)]
        to = [(place, c if c < n else 2 * n - 1 - c) for place, c in chunks]
        return [(a * self.inner + u, b * self.inner + u) for a, b in to for u in range(self.inner)]

    def _by_parity(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Swap on odd places: their early chunk is odd, and so was the second half of somebody's
        shard.
        """
        even = self.place % 2 == 0
        return jnp.where(even, a, b), jnp.where(even, b, a)
