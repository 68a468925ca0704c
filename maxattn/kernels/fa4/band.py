"""What FlashAttention-4 computes of a mask that it gets no block-sparse lists of: a band around it.

    pairs (i, j) with  i - left <= j <= i + right

and of shards, whose positions are known on the device alone, all pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxattn.call import Call
from maxattn.kernels.fa4 import mask_inputs
from maxattn.masks import Mask
from maxattn.masks.row_runs import row_runs


class BandShares(NamedTuple):
    """Hold which share of all pairs is computed, and which the mask's positions allow."""

    computed: float
    allowed: float


def shares(call: Call) -> BandShares:
    """Return the shares of a local call."""
    mask = mask_inputs.positions(call.mask)
    q_len, kv_len = call.sequence or (call.q_len, call.kv_len)
    every, allowed = q_len * kv_len, mask.allowed_pairs(q_len, kv_len)
    computed = every if call.sharded else _pairs(_around(mask, q_len, kv_len), q_len, kv_len)
    return BandShares(computed / every, allowed / every)


def _around(mask: Mask, q_len: int, kv_len: int) -> tuple[int, int] | None:
    """Return (left, right) of the narrowest band; None where the mask allows nothing."""
    nothing = -q_len - kv_len
    left = right = nothing
    for runs in row_runs(mask, q_len, kv_len):
        # Ends move with the rows of a run or stand still: their extremes are at its two ends.
        for at in (np.zeros_like(runs.count), runs.count - 1):
            row = (runs.first + at * runs.step)[:, None]
            lo, hi = runs.lo + at[:, None] * runs.lo_step, runs.hi + at[:, None] * runs.hi_step
            some = lo < hi
            if some.any():
                left = max(left, int((row - lo)[some].max()))
                right = max(right, int((hi - 1 - row)[some].max()))
    return None if left == nothing else (left, right)


def _pairs(band: tuple[int, int] | None, q_len: int, kv_len: int) -> int:
    """Count the pairs of a band; all of them where there is none."""
    if band is None:
        return q_len * kv_len
    # A side that is negative bounds nothing (mask_inputs.py).
    left, right = (n if n >= 0 else q_len + kv_len for n in band)
    return _up_to(right, q_len, kv_len) - _up_to(-left - 1, q_len, kv_len)


def _up_to(n: int, q_len: int, kv_len: int) -> int:
    """Count the pairs with j <= i + n."""

    def triangle(m: int) -> int:
        return m * (m + 1) // 2 if m > 0 else 0

    # The sum over i of i + n + 1, cut below 0 and above kv_len.
    below = triangle(n + q_len) - triangle(n)
    return below - (triangle(n + q_len - kv_len) - triangle(n - kv_len))
