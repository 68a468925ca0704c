"""Counts of allowed pairs in blocks, from each query's intervals: no array of T x S."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from maxattn.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Int, Int8

    from maxattn.masks.base import Mask

ROWS = 2**20  # queries at a time: arrays of ten million, 32 intervals each, take gigabytes
EMPTY, FULL, MIXED = 0, 1, 2
"""What a block of pairs can be: all forbidden, all allowed, some of each."""


def classify(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int
) -> Int8[np.ndarray, "QB KB"]:
    """Mark every block of a bound mask as EMPTY, FULL or MIXED."""
    if mask.is_full and min(block_q, block_kv) > 0:
        return np.full((-(-q_len // block_q), -(-kv_len // block_kv)), FULL, dtype=np.int8)
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
    rows = block_q * max(1, ROWS // block_q)
    starts = range(0, q_len, rows)
    slabs = [
        _count_rows(mask, (start, min(start + rows, q_len)), (block_q, block_kv), kv_len, data)
        for start in starts
    ]
    return np.concatenate(slabs) if slabs else np.zeros((0, -(-kv_len // block_kv)), np.int64)


def _count_rows(
    mask: Mask, rows: tuple[int, int], block: tuple[int, int], kv_len: int, data: bool
) -> np.ndarray:
    """Count the pairs of some rows of blocks; memory grows with the rows at a time."""
    first, end = rows
    shape = -(-(end - first) // block[0]), -(-kv_len // block[1])
    lo, hi = disjoint(mask, rows, kv_len, data)
    row = (np.arange(end - first) // block[0])[:, None] * (shape[1] + 1)
    whole = _add(row + hi // block[1], -block[1], shape) - _add(
        row + lo // block[1], -block[1], shape
    )
    part = _add(row + hi // block[1], hi % block[1], shape) - _add(
        row + lo // block[1], lo % block[1], shape
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
    mask: Mask, rows: tuple[int, int], kv_len: int, data: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Give intervals of the queries of some rows, sorted, clipped and without overlap.

    Returns:
        Starts and ends, `[rows, n]`.
    """
    pairs_ = mask.intervals(np.arange(*rows), np, data)
    if not pairs_:
        nothing = np.zeros((rows[1] - rows[0], 0), dtype=np.int64)
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
    slabs = ((i, min(i + ROWS, q_len)) for i in range(0, q_len, ROWS))
    ends = (disjoint(mask, rows, kv_len) for rows in slabs)
    return sum(int((hi - lo).sum()) for lo, hi in ends)
