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
    through = _summed_up_to(jax.lax.population_count(words).astype(jnp.int32))
    rank = jax.lax.broadcasted_iota(jnp.int32, chosen.shape, chosen.ndim - 1)
    word, first, behind = words[..., :1], jnp.int32(0), rank
    for i in range(1, words.shape[-1]):
        past = rank >= through[..., i - 1 : i]
        word, first = jnp.where(past, words[..., i : i + 1], word), jnp.where(past, BITS * i, first)
        behind = jnp.where(past, rank - through[..., i - 1 : i], behind)
    return through[..., -1], first + _nth_set_bit(word, behind)


def _summed_up_to(x: Int32[Array, "*rows words"]) -> Int32[Array, "*rows words"]:
    """Sum up to each word, that one included."""
    shape = (*x.shape, x.shape[-1])
    to, of = (jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - i) for i in (2, 1))
    return jnp.where(of <= to, x[..., None, :], 0).sum(axis=-1)


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
