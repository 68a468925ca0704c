"""Count the allowed pairs of each block, from runs of query rows, without an array [T, S]."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from maxattn.errors import InputError
from maxattn.masks.row_runs import RowRuns, row_runs

if TYPE_CHECKING:
    from jaxtyping import Int, Int8

    from maxattn.masks.base import Mask

    Many = Int[np.ndarray, " n"]

EMPTY, FULL, MIXED = 0, 1, 2
"""The kinds of a block of pairs: none is allowed, all are allowed, some are allowed."""


class Stretches(NamedTuple):
    """Runs of neighbouring blocks with equally many allowed pairs, each in one row of blocks."""

    row: Many  # [n], the index of the block of queries
    # start, end: [n], the indexes [start, end) of the blocks of keys
    start: Many
    end: Many
    pairs: Many  # [n], the number of allowed pairs in each block of the run, at least 1


def classify(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int
) -> Int8[np.ndarray, "QB KB"]:
    """Return the table of a bound mask's blocks, each EMPTY, FULL or MIXED."""
    sizes = block_q, block_kv, q_len, kv_len
    if mask.is_full and min(block_q, block_kv) > 0:
        return np.full(_shape(*sizes), FULL, dtype=np.int8)
    most = count(mask, *sizes)
    least = most if mask.has_exact_intervals else count(mask, *sizes, data=False)
    out = np.full(most.shape, MIXED, dtype=np.int8)
    out[least == areas(*sizes)] = FULL
    out[most == 0] = EMPTY
    return out


def tally(mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int) -> tuple[int, int, int]:
    """Count a bound mask's EMPTY, FULL and MIXED blocks."""
    sizes = block_q, block_kv, q_len, kv_len
    rows, columns = _shape(*sizes)
    if mask.is_full:
        return 0, rows * columns, 0
    found, sure = stretches(mask, *sizes), whole_stretches(mask, *sizes)
    some, whole = (int((x.end - x.start).sum()) for x in (found, sure))
    return rows * columns - some, whole, some - whole


def count(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int, data: bool = True
) -> Int[np.ndarray, "QB KB"]:
    """Count each block's allowed pairs; masks with arrays allow every pair if `data`, else none."""
    sizes = block_q, block_kv, q_len, kv_len
    rows, columns = _shape(*sizes)
    found = stretches(mask, *sizes, data)
    out = np.zeros((rows, columns + 1), np.int64)
    np.add.at(out, (found.row, found.start), found.pairs)
    np.add.at(out, (found.row, found.end), -found.pairs)
    return np.cumsum(out, axis=1)[:, :-1]


def stretches(
    mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int, data: bool = True
) -> Stretches:
    """List the runs of blocks in which a bound mask allows any pair.

    The list grows with the number of interval ends, not with the number of blocks, which may be
    billions. Block j has `clip(x - j * block_kv, 0, block_kv)` keys below position x: this number
    for an interval's end minus that for its start is the number of the interval's keys in block j.
    So each end adds one entry per query row, or one per block that a run of query rows crosses.
    """
    rows, columns = _shape(block_q, block_kv, q_len, kv_len)
    found = [
        _summed(*_entries(runs, block_q, block_kv, columns + 1))
        for runs in row_runs(mask, q_len, kv_len, data, rows + columns)
    ]
    cell, wholes, parts = _summed(*(np.concatenate(x) for x in zip(*found, strict=True)))
    # The entries of `wholes` in a row of blocks add up to 0, so `inside` is 0 after the row.
    inside, (row, at) = np.cumsum(wholes), np.divmod(cell, columns + 1)
    then = np.append(cell[1:], cell[-1:] + 1) - row * (columns + 1)
    both = [(row, at, at + 1, inside + parts), (row, at + 1, then, inside)]
    row, start, end, pairs = (np.concatenate(x) for x in zip(*both, strict=True))
    some = (pairs > 0) & (start < end)
    return Stretches(row[some], start[some], end[some], pairs[some])


def whole_stretches(mask: Mask, block_q: int, block_kv: int, q_len: int, kv_len: int) -> Stretches:
    """List the runs of a bound mask's FULL blocks; a row's narrower last block is its own run."""
    sure = stretches(mask, block_q, block_kv, q_len, kv_len, data=mask.has_exact_intervals)
    long, wide = _sizes(block_q, q_len), _sizes(block_kv, kv_len)
    # FULL blocks of one run have equally many pairs, so they are equally wide.
    full = sure.pairs == long[sure.row] * wide[sure.start]
    return Stretches(*(x[full] for x in sure))


def pairs(mask: Mask, q_len: int, kv_len: int) -> int:
    """Count the pairs that a bound mask allows; an upper bound unless its intervals are exact."""
    total = 0
    for runs in row_runs(mask, q_len, kv_len):
        many, steps = runs.count[:, None], runs.hi_step - runs.lo_step
        total += int((many * (runs.hi - runs.lo) + many * (many - 1) // 2 * steps).sum())
    return total


def areas(block_q: int, block_kv: int, q_len: int, kv_len: int) -> Int[np.ndarray, "QB KB"]:
    return np.outer(_sizes(block_q, q_len), _sizes(block_kv, kv_len))


def _sizes(block: int, length: int) -> np.ndarray:
    starts = np.arange(0, length, block, dtype=np.int64)
    return np.minimum(starts + block, length) - starts


def _shape(block_q: int, block_kv: int, q_len: int, kv_len: int) -> tuple[int, int]:
    for name, size in (("block_q", block_q), ("block_kv", block_kv)):
        if size < 1:
            rule, remedy = "a block must have at least one token", f"give {name} of 1 or more"
            raise InputError(name, size, rule, remedy)
    return -(-q_len // block_q), -(-kv_len // block_kv)


def _entries(runs: RowRuns, block_q: int, block_kv: int, columns: int) -> tuple[Many, Many, Many]:
    """Return each interval end's block, the pairs it adds from that block on, and in that block."""
    cut = _cut(runs.first, np.full_like(runs.first, runs.step), runs.count, block_q)
    # For each interval end the query rows are in order, so that `_summed` sorts quickly.
    ends = np.concatenate([runs.hi.T, runs.lo.T])[:, cut.of]
    step = np.concatenate([runs.hi_step.T, runs.lo_step.T])[:, cut.of]
    sign = np.broadcast_to(np.repeat([1, -1], runs.hi.shape[1])[:, None], step.shape)
    start, step, sign = (ends + step * cut.skip).ravel(), step.ravel(), sign.ravel()
    row, many = (np.tile(x, 2 * runs.hi.shape[1]) for x in (cut.block, cut.count))
    cut = _cut(start, step, many, block_kv)
    start, step, sign = start[cut.of], step[cut.of], sign[cut.of]
    inside, many = start + step * cut.skip - cut.block * block_kv, cut.count
    part = many * inside + step * (many * (many - 1) // 2)
    return row[cut.of] * columns + cut.block, -sign * many * block_kv, sign * part


def _summed(cell: Many, whole: Many, part: Many) -> tuple[Many, Many, Many]:
    order = np.argsort(cell, kind="stable")
    cell, whole, part = (x[order] for x in (cell, whole, part))
    begins = np.flatnonzero(np.diff(cell, prepend=-1))
    whole, part = (np.add.reduceat(x, begins) if x.size else x for x in (whole, part))
    return cell[begins], whole, part


class _Pieces(NamedTuple):
    """Pieces of arithmetic series: index of the series, block, first term, number of terms."""

    of: Many
    block: Many
    skip: Many
    count: Many


def _cut(start: Many, step: Many, count: Many, block: int) -> _Pieces:
    """Cut the series `start + i * step`, i < count, at the multiples of `block`."""
    first, last = start // block, (start + (count - 1) * step) // block
    pieces = last - first + 1
    of = np.repeat(np.arange(start.size), pieces)
    at = first[of] + np.arange(of.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start, step, count = start[of], step[of], count[of]
    rise = np.maximum(step, 1)
    skip = np.maximum(-((start - at * block) // rise), 0)
    past = np.where(step > 0, -((start - (at + 1) * block) // rise), count)
    many = np.minimum(past, count) - skip
    some = many > 0  # a step longer than a block passes blocks without a term
    return _Pieces(*(x[some] for x in (of, at, skip, many)))
