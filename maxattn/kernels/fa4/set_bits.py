"""Numbers of the columns that are chosen in each row, made on the device without a sort.

The columns of a row are bits of a few words. The n-th chosen column is in the first word up to
which more than n bits are set, and is found there by halves. That is arithmetic on each number by
itself, which XLA joins to a launch or two; a sort of as many numbers is a dozen launches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt32

BITS = 32
MOST_WORDS = 64  # of a row; each number looks at all of them


def fits(columns: int) -> bool:
    """Tell whether rows of so many columns have few words."""
    return columns <= BITS * MOST_WORDS


def set_columns(
    chosen: Bool[Array, "*rows columns"],
) -> tuple[Int32[Array, "*rows"], Int32[Array, "*rows columns"]]:
    """Return how many columns of each row are chosen, and these, ascending.

    What is past the count means nothing.
    """
    words = _words(chosen)
    rank = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
    before = jnp.zeros((*chosen.shape[:-1], 1), jnp.int32)
    word, first, behind = words[..., :1], jnp.int32(0), rank
    for i in range(words.shape[-1]):
        this = words[..., i : i + 1]
        here = rank >= before
        word, first = jnp.where(here, this, word), jnp.where(here, BITS * i, first)
        behind = jnp.where(here, rank - before, behind)
        before = before + jax.lax.population_count(this).astype(jnp.int32)
    return before[..., 0], first + _nth_set_bit(word, behind)


def _words(chosen: Bool[Array, "*rows columns"]) -> UInt32[Array, "*rows words"]:
    """Write the columns of a row as bits, the first one lowest."""
    columns = chosen.shape[-1]
    room = [(0, 0)] * (chosen.ndim - 1) + [(0, -columns % BITS)]
    bits = jnp.pad(chosen, room).reshape(*chosen.shape[:-1], -1, BITS)
    place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
    return (bits.astype(jnp.uint32) << place).sum(axis=-1, dtype=jnp.uint32)


def _nth_set_bit(word: UInt32[Array, "..."], n: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Return where the n-th set bit of a word is, from 0."""
    at = jnp.zeros(n.shape, jnp.int32)
    for size in (16, 8, 4, 2, 1):
        low = (word >> at.astype(jnp.uint32)) & np.uint32((1 << size) - 1)
        below = jax.lax.population_count(low).astype(jnp.int32)
        past = n >= below
        n, at = jnp.where(past, n - below, n), jnp.where(past, at + size, at)
    return at
