"""A band of pairs, cut into rectangles that kernels without offsets compute: full ones, and bands
that start at 0, 0.

Where the offsets are traced, the shift between queries and keys is one of few values (whole shards
apart), and each has its own rectangles under `lax.switch`.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from maxattn.kernels.fused.masks import Band, Parts

MOST_SHIFTS = 66  # cases of one call: 64 devices, and the two ends


class Piece(NamedTuple):
    """Name queries [q0, q1) and keys [k0, k1), and a band `i - left <= j <= i + right` counted from
    their corner.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int | None = None
    right: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every pair of it is allowed."""
        return self.left is None and self.right is None

    def sees_all(self) -> bool:
        """Tell whether each of its queries sees a key, while all keys are real."""
        return self.left is None or self.q1 - self.q0 - 1 - self.left < self.k1 - self.k0


def pieces(band: Band, shift: int, q_len: int, kv_len: int) -> tuple[Piece, ...]:
    """Cut the pairs that a band allows into rectangles, in at most two pieces.

    Args:
        band: its own offset is ignored.
        shift: position of the first query minus position of the first key, the band's offset
            included.
        q_len, kv_len: local lengths.
    """
    if band.is_full:
        return (Piece(0, q_len, 0, kv_len),)
    # Key j is allowed to query i where low <= j - i <= high.
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
    """Cut `j - i <= high`: what all queries see, and a triangle that starts at 0, 0."""
    if high < 0:
        return (Piece(-high, q_len, 0, kv_len, None, 0),)
    triangle = Piece(0, q_len, high, kv_len, None, 0)
    return (triangle,) if high == 0 else (Piece(0, q_len, 0, high), triangle)


def _window(low: int, high: int | None, q_len: int, kv_len: int) -> Piece:
    """Cut `low <= j - i <= high` so that both sides of the band are 0 or more."""
    k0 = max(0, low)
    q0 = 0 if high is None else max(0, -high)
    move = q0 - k0  # j' - i' = j - i + move
    right = None if high is None or high + move >= kv_len - k0 - 1 else high + move
    return Piece(q0, q_len, k0, kv_len, -(low + move), right)


def shifts(band: Band, q_len: int, kv_len: int) -> tuple[int, ...]:
    """List the shifts at which shards of queries and keys can lie apart, from one with nothing
    allowed to one with all.

    Shards begin at multiples of their lengths, so that shifts are the band's offset plus multiples
    of a common step. A shift beyond either end allows as little, or as much, as that end.
    """
    step = gcd(q_len, kv_len)
    least = -q_len - max(0, band.right or 0)
    most = kv_len + (band.left or 0)
    first = least - (least - band.offset) % step
    return tuple(range(first, most + step, step))


def fits_shards(parts: Parts, q_len: int, kv_len: int) -> bool:
    """Tell whether a band between shards is one of few cases: full, empty, or cut at a distance of
    whole shards.

    Shards of unequal lengths are left out. Their cases would be cut in two pieces each, and on two
    H200s a program with such a switch beside a gather of the keys died with a segmentation fault,
    in jax 0.11.2, whichever the kernel.
    """
    if parts.band is None or parts.band.is_full:
        return True
    return q_len == kv_len and len(shifts(parts.band, q_len, kv_len)) <= MOST_SHIFTS
