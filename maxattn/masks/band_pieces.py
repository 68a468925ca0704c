"""Cut a band of pairs into rectangles that a kernel without offsets can compute.

Each rectangle is full, or has a band that starts at the rectangle's corner. If the offsets are
traced, the shift between queries and keys is a whole number of shards, so it has few values, and
`lax.switch` selects the rectangles of each value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn.errors import Unsupported
from maxattn.masks.for_kernels import Band
from maxattn.masks.terms import Offset, Terms

MOST_SHIFTS = 66  # most cases of a `lax.switch`: 64 devices, and the first and last shift


class Piece(NamedTuple):
    """A rectangle of queries [q0, q1) and keys [k0, k1) that contains a band.

    Query q0 + i sees key k0 + j if `i - left <= j <= i + right`; None is no bound.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether the piece allows every pair of its rectangle."""
        return self.left is None and self.right is None

    def sees_all(self) -> bool:
        """Check whether each query of the piece sees a key, if no key is padding."""
        return self.left is None or self.q1 - self.q0 - 1 - self.left < self.k1 - self.k0


def pieces(band: Band, shift: int, q_len: int, kv_len: int) -> tuple[Piece, ...]:
    """Cut the pairs that a band allows into at most two rectangles; `shift` has `band.offset`."""
    if band.is_full:
        return (Piece(0, q_len, 0, kv_len),)
    # Query i may attend to key j if low <= j - i <= high.
    low = None if band.left is None else shift - band.left
    high = None if band.right is None else shift + band.right
    if (high is not None and high <= -q_len) or (low is not None and low >= kv_len):
        return ()
    if (low is None or low <= 1 - q_len) and (high is None or high >= kv_len - 1):
        return (Piece(0, q_len, 0, kv_len),)
    if low is None or low <= 1 - q_len:
        assert high is not None
        return _causal(high, q_len, kv_len)
    return (_window(low, high, q_len, kv_len),)


def _causal(high: int, q_len: int, kv_len: int) -> tuple[Piece, ...]:
    """Cut `j - i <= high` into the keys that all queries see, and a triangle over other keys."""
    if high < 0:
        return (Piece(-high, q_len, 0, kv_len, None, 0),)
    triangle = Piece(0, q_len, high, kv_len, None, 0)
    return (triangle,) if high == 0 else (Piece(0, q_len, 0, high), triangle)


def _window(low: int, high: int | None, q_len: int, kv_len: int) -> Piece:
    """Return the pairs `low <= j - i <= high` as one piece whose left and right are at least 0."""
    k0 = max(0, low)
    q0 = 0 if high is None else max(0, -high)
    move = q0 - k0  # j' - i' = j - i + move
    right = None if high is None or high + move >= kv_len - k0 - 1 else high + move
    return Piece(q0, q_len, k0, kv_len, -(low + move), right)


def shifts(band: Band, q_len: int, kv_len: int) -> tuple[int, ...]:
    """List the shifts between a query shard and a key shard that give different pieces.

    Shards begin at multiples of their lengths, so a shift is the band's offset plus a multiple of a
    common step. A smaller or larger shift gives the pieces of the first or last listed shift.
    """
    step = gcd(q_len, kv_len)
    least = -q_len - max(0, band.right or 0)
    most = kv_len + (band.left or 0)
    first = least - (least - band.offset) % step
    return tuple(range(first, most + step, step))


def fits_shards(terms: Terms, q_len: int, kv_len: int) -> bool:
    """Check whether a band between equally long shards has at most `MOST_SHIFTS` cases.

    Shards of unequal lengths are refused: each case would have two pieces, and a program with such
    a `lax.switch` beside an all-gather of the keys ended in a segmentation fault on two H200s (jax
    0.11.2, any kernel).
    """
    band = terms.band
    if band is None or band.is_full:
        return True
    return q_len == kv_len and len(shifts(band, q_len, kv_len)) <= MOST_SHIFTS


def run_pieces(
    terms: Terms,
    shift: Offset,
    lengths: tuple[int, int],
    compute: Callable[..., Any],
    *operands: Any,
) -> Any:
    """Return `compute(pieces, *operands)`; if `shift` is traced, `over_shifts` selects pieces."""
    band = terms.band
    assert band is not None and not terms.rest, terms  # supports() refused it
    if band.is_full or not isinstance(shift, jax.Array):
        at = 0 if band.is_full else int(shift) + band.offset
        return compute(pieces(band, at, *lengths), *operands)
    if not fits_shards(terms, *lengths):
        value = f"traced, for {lengths[0]} queries and {lengths[1]} keys of {band}"
        rule = "with traced offsets a band needs query and key shards of one length, and at most"
        remedy = "give the offsets as ints, or set attention: auto"
        raise Unsupported("q_offset, kv_offset", value, f"{rule} {MOST_SHIFTS - 2} shards", remedy)

    def branch(case: int) -> Callable[..., Any]:
        return partial(compute, pieces(band, case, *lengths))

    return over_shifts(band, shift, lengths, branch, *operands)


def over_shifts(
    band: Band,
    shift: Any,
    lengths: tuple[int, int],
    branch: Callable[[int], Callable[..., Any]],
    *operands: Any,
) -> Any:
    """Return `branch(case)(*operands)` for the case of a traced shift, under `lax.switch`.

    A case is the shift plus the band's offset. In every strategy, offsets are multiples of the
    shards' lengths. If a traced offset is no such multiple, the result is NaN, since only the
    device sees the offset's value.
    """
    cases = shifts(band, *lengths)
    step, first = cases[1] - cases[0], cases[0]
    bounded = jnp.clip(shift + band.offset, first, cases[-1]) - first
    result = jax.lax.switch(bounded // step, [branch(case) for case in cases], *operands)
    return jax.tree.map(lambda x: jnp.where(bounded % step == 0, x, jnp.nan), result)
