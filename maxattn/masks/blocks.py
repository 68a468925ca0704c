"""Counts of allowed pairs in blocks, from each query's intervals: no array of T x S."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from maxattn.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Int, Int8

    from maxattn.masks.base import Mask

EMPTY, FULL, MIXED = 0, 1, 2
"""What a block of pairs can be: all forbidden, all allowed, some of each."""


def classify(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int
) -> Int8[np.ndarray, "QB KB"]:
    """Mark every block of a bound mask as EMPTY, FULL or MIXED."""
    most = count(mask, block_q, block_kv, q_len, kv_len)
    exact = mask.has_exact_intervals
    least = most if exact else count(mask, block_q, block_kv, q_len, kv_len, data=False)
    out = np.full(most.shape, MIXED, dtype=np.int8)
    out[least == areas(block_q, block_kv, q_len, kv_len)] = FULL
    out[most == 0] = EMPTY
    return out


def count(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int, data: bool = True
) -> Int[np.ndarray, "QB KB"]:
    """Count the pairs of each block that a bound mask allows; `data` is what data masks count as.

    The keys below x that lie in block j are `clip(x - j * block_kv, 0, block_kv)`: whole blocks
    before x and a part of the one that x is in. An interval adds this for its end and takes it away
    for its start, so a row costs two entries.
    """
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size < 1:
            raise InputError(
                name, size, "a block has at least one token", f"give {name} of 1 or more"
            )
    shape = -(-q_len // block_q), -(-kv_len // block_kv)
    lo, hi = disjoint(mask, q_len, kv_len, data)
    row = (np.arange(q_len) // block_q)[:, None] * (shape[1] + 1)
    whole = _add(row + hi // block_kv, -block_kv, shape) - _add(
        row + lo // block_kv, -block_kv, shape
    )
    part = _add(row + hi // block_kv, hi % block_kv, shape) - _add(
        row + lo // block_kv, lo % block_kv, shape
    )
    return (np.cumsum(whole, axis=1) + part)[:, :-1]


def _add(where: np.ndarray, amount: np.ndarray | int, shape: tuple[int, int]) -> np.ndarray:
    weights = np.broadcast_to(np.asarray(amount, dtype=np.float64), where.shape).ravel()
    cells = shape[0] * (shape[1] + 1)
    total = np.bincount(
        where.ravel(), weights=weights, minlength=cells
    )  # float64 counts exactly up to 2**53
    return total.astype(np.int64).reshape(shape[0], shape[1] + 1)


def disjoint(
    mask: Mask, q_len: int, kv_len: int, data: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Give each query's intervals sorted, clipped and without overlap: starts, ends `[T, n]`."""
    pairs_ = mask.intervals(np.arange(q_len), np, data)
    if not pairs_:
        nothing = np.zeros((q_len, 0), dtype=np.int64)
        return nothing, nothing
    lo, hi = (
        np.minimum(np.stack(ends, axis=1), kv_len).astype(np.int64)
        for ends in zip(*pairs_, strict=True)
    )
    order = np.argsort(lo, axis=1, kind="stable")
    lo, hi = np.take_along_axis(lo, order, axis=1), np.take_along_axis(hi, order, axis=1)
    reached = np.maximum.accumulate(hi, axis=1)
    lo[:, 1:] = np.maximum(lo[:, 1:], reached[:, :-1])
    return lo, np.maximum(lo, hi)


def areas(block_q: int, block_kv: int, q_len: int, kv_len: int) -> Int[np.ndarray, "QB KB"]:
    """Count the pairs that each block has, ragged last blocks included."""
    return np.outer(_sizes(block_q, q_len), _sizes(block_kv, kv_len))


def _sizes(block: int, length: int) -> np.ndarray:
    starts = np.arange(0, length, block, dtype=np.int64)
    return np.minimum(starts + block, length) - starts


def pairs(mask: Mask, q_len: int, kv_len: int) -> int:
    """Count the pairs that a bound mask allows; an upper bound where its intervals are one."""
    lo, hi = disjoint(mask, q_len, kv_len)
    return int((hi - lo).sum())
