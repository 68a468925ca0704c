"""Query rows in runs: equally spaced rows whose intervals of keys stay, or move with the rows.

The ends of a known mask's intervals never fall, and over one period of its blocks they rise by at
most a period; `min`, `max` and sorting preserve both. So an end that rises over a run by nothing,
or as far as the rows do, does so at every step of the run. Other runs are halved.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Int

    from maxattn.masks.base import Mask

    Rows = Int[np.ndarray, " R"]
    Ends = Int[np.ndarray, "R M"]

MOST_KEPT = 2**18  # pieces of a mask whose runs are cached for the next block sizes
ROWS = 2**20  # query rows at a time: arrays of ten million, 32 intervals each, take gigabytes


class RowBlocks(NamedTuple):
    """The query rows at which the ends of a mask's intervals jump.

    Args:
        size: rows in a block; at the first row of each, ends rise by at most this much.
        phase: position of row 0, counted from the first row of a block.
        turns: rows at which ends jump by more.
    """

    size: int
    phase: int = 0
    turns: tuple[int, ...] = ()


class RowRuns(NamedTuple):
    """Rows `first + i * step` for i < count, with disjoint intervals [lo, hi) of each.

    Args:
        first, count: [R].
        step: between the rows of a run.
        lo, hi: [R, M] of each first row, clipped to the keys, sorted.
        lo_step, hi_step: [R, M], 0 or `step`: their rise from a row to the next one.
    """

    first: Rows
    count: Rows
    step: int
    lo: Ends
    hi: Ends
    lo_step: Ends
    hi_step: Ends


def row_runs(
    mask: Mask, q_len: int, kv_len: int, data: bool = True, cuts: int = 0
) -> Iterator[RowRuns]:
    """Yield all query rows of a bound mask in runs.

    `data` is what masks with arrays count as; the caller cuts each run into at most `cuts` pieces.
    """
    blocks = mask.row_blocks()
    way = None if blocks is None else _way(blocks, q_len, cuts)
    if way is not None:
        arrays = any(isinstance(x, np.ndarray | jax.Array) for x in jax.tree.leaves(mask))
        keep = way.pieces <= MOST_KEPT and not arrays  # which have no hash
        yield (_kept if keep else _runs)(mask, way._replace(pieces=0), q_len, kv_len, data)
        return
    for first in range(0, q_len, ROWS):
        rows = np.arange(first, min(first + ROWS, q_len))
        lo, hi = _disjoint(mask, rows, kv_len, data)
        still = np.zeros_like(lo)
        yield RowRuns(rows, np.ones_like(rows), 1, lo, hi, still, still)


class _Way(NamedTuple):
    """How rows become runs: the number of pieces, the blocks to cut at, and the step."""

    pieces: int
    cut: tuple[RowBlocks, ...]
    turns: tuple[int, ...]
    step: int


def _way(blocks: tuple[RowBlocks, ...], q_len: int, cuts: int) -> _Way | None:
    """Choose how rows become runs, or None if every row may as well be one.

    Runs step over small blocks, by their common multiple, and are cut at large ones.
    """
    ordered = tuple(sorted(set(blocks)))
    turns = tuple(turn for block in ordered for turn in block.turns if 0 < turn < q_len)
    ways = []
    for many in range(len(ordered) + 1):
        step = lcm(*(block.size for block in ordered[:many]))
        starts = sum(q_len // block.size for block in ordered[many:])
        pieces = step * (1 + len(turns) + starts + cuts)
        ways.append(_Way(pieces, ordered[many:], turns, step))
    best = min(ways)
    return best if best.pieces <= q_len else None


def _runs(mask: Mask, way: _Way, q_len: int, kv_len: int, data: bool) -> RowRuns:
    """Cut the rows, and halve runs until every end stays or moves with the rows."""
    step = way.step
    starts = [np.arange(-b.phase % b.size, q_len, b.size) for b in way.cut]
    edges = np.unique(np.concatenate([np.array([0, *way.turns, q_len]), *starts]))
    start, end = (np.repeat(x, step) for x in (edges[:-1], edges[1:]))
    first = start + np.tile(np.arange(step), len(edges) - 1)
    first, end = first[first < end], end[first < end]
    count = -((first - end) // step)
    done: list[tuple[np.ndarray, ...]] = []
    while first.size or not done:
        ends = _disjoint(mask, first, kv_len, data)
        last = _disjoint(mask, first + (count - 1) * step, kv_len, data)
        rises = [b - a for a, b in zip(ends, last, strict=True)]
        steps = [np.where(rise > 0, step, 0) for rise in rises]
        made = zip(rises, steps, strict=True)
        even = np.all([rise == (count - 1)[:, None] * each for rise, each in made], axis=(0, 2))
        done.append(tuple(x[even] for x in (first, count, *ends, *steps)))
        first, count = first[~even], count[~even]
        half = count // 2
        first = np.concatenate([first, first + half * step])
        count = np.concatenate([half, count - half])
    first, count, *ends = (np.concatenate(x) for x in zip(*done, strict=True))
    order = np.argsort(first, kind="stable")
    first, count, *ends = (x[order] for x in (first, count, *ends))
    return RowRuns(first, count, step, *ends)


_kept = lru_cache(maxsize=8)(_runs)


def _disjoint(mask: Mask, rows: Rows, kv_len: int, data: bool) -> tuple[Ends, Ends]:
    """Return the intervals of some rows, sorted, clipped and without overlap."""
    found = mask.intervals(rows, np, data)
    if not found:
        nothing = np.zeros((rows.size, 0), np.int64)
        return nothing, nothing
    both = (np.stack(ends, axis=1) for ends in zip(*found, strict=True))
    lo, hi = (np.minimum(ends, kv_len).astype(np.int64) for ends in both)
    lo, hi = np.sort(np.minimum(lo, hi), axis=1), np.sort(hi, axis=1)
    lo[:, 1:] = np.maximum(lo[:, 1:], hi[:, :-1])
    return lo, hi
