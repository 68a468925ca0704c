"""A band of pairs, cut into rectangles that a kernel without offsets computes.

Each rectangle is full, or holds a band that starts at its corner. Where the offsets are traced, the
shift between queries and keys is one of few values (whole shards apart), and each has rectangles of
its own under `lax.switch`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxattn.errors import Unsupported
from maxattn.masks.for_kernels import Band
from maxattn.masks.terms import Offset, Terms

MOST_SHIFTS = 66  # cases of one call: 64 devices, and the two ends


class Piece(NamedTuple):
    """Name queries [q0, q1) and keys [k0, k1), and a band `i - left <= j <= i + right` in them.

    The band's i and j count from q0 and k0.
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
        """Return whether each of its queries sees a key, while all keys are real."""
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
    """List the shifts at which shards can lie apart, from nothing allowed to everything allowed.

    Shards begin at multiples of their lengths, so shifts are the band's offset plus multiples of a
    common step. A shift beyond either end allows what that end allows.
    """
    step = gcd(q_len, kv_len)
    least = -q_len - max(0, band.right or 0)
    most = kv_len + (band.left or 0)
    first = least - (least - band.offset) % step
    return tuple(range(first, most + step, step))


def fits_shards(terms: Terms, q_len: int, kv_len: int) -> bool:
    """Return whether a band is one of few cases between shards: full, empty, or cut at shards.

    Shards of unequal lengths are left out. Their cases would be cut in two pieces each, and on two
    H200s a program with such a switch beside a gather of the keys died with a segmentation fault,
    in jax 0.11.2, whichever the kernel.
    """
    return terms.band is None or _few_shifts(terms.band, q_len, kv_len)


def _few_shifts(band: Band, q_len: int, kv_len: int) -> bool:
    if band.is_full:
        return True
    return q_len == kv_len and len(shifts(band, q_len, kv_len)) <= MOST_SHIFTS


@dataclass(frozen=True)
class ShiftedBand:
    """The band between the local queries and the local keys of one call.

    Args:
        band: that the mask's positions allow.
        shift: position of the first query minus position of the first key, the band's offset
            included; an int, or traced inside `shard_map`.
        q_len, kv_len: local lengths.
    """

    band: Band
    shift: Offset
    q_len: int
    kv_len: int

    def run(self, compute: Callable[..., Any], *operands: Any) -> Any:
        """Return `compute(pieces, *operands)` for the pieces of the shift.

        A traced shift chooses among the cases of whole shards under `lax.switch`. Shards that give
        no such cases are refused. Whether the offsets are multiples of the shards' lengths, as
        every strategy here has them, is known on the device alone: where they are not, the result
        is NaN.
        """
        if self.band.is_full:
            return compute(self._pieces(0), *operands)
        if not isinstance(self.shift, jax.Array):
            return compute(self._pieces(int(self.shift)), *operands)
        if not _few_shifts(self.band, self.q_len, self.kv_len):
            raise self._refused()
        return self._switch(self.shift, compute, operands)

    def _pieces(self, shift: int) -> tuple[Piece, ...]:
        return pieces(self.band, shift, self.q_len, self.kv_len)

    def _switch(self, shift: jax.Array, compute: Callable[..., Any], operands: Any) -> Any:
        cases = shifts(self.band, self.q_len, self.kv_len)
        step = cases[1] - cases[0]
        bounded = jnp.clip(shift, cases[0], cases[-1])
        branches = [partial(compute, self._pieces(case)) for case in cases]
        result = jax.lax.switch((bounded - cases[0]) // step, branches, *operands)
        is_case = (bounded - cases[0]) % step == 0
        return jax.tree.map(lambda x: jnp.where(is_case, x, jnp.nan), result)

    def _refused(self) -> Unsupported:
        value = f"traced, for {self.q_len} queries and {self.kv_len} keys of {self.band}"
        rule = (
            "between shards a band is cut where queries and keys are split alike, at most"
            f" {MOST_SHIFTS - 2} times"
        )
        return Unsupported(
            "q_offset, kv_offset", value, rule, "give them as ints, or set attention: auto"
        )
