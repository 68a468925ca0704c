"""Runs of query rows: equally spaced rows whose key intervals stay, or move with the query row.

In a mask without arrays, an interval end never falls from one query row to the next, and over one
period of the mask's blocks it rises by at most a period; `min`, `max` and sorting keep this. So if
an end rises over a run by 0, or as much as the query row, it does so at every step of the run.
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

MOST_KEPT = 2**18  # up to this many pieces, a mask's runs are cached for other block sizes
ROWS = 2**20  # most query rows at a time: ten million with 32 intervals each take gigabytes


class RowBlocks(NamedTuple):
    """The query rows at which a mask's interval ends jump."""

    size: int  # query rows in a block; at a block's first row, interval ends rise by at most `size`
    phase: int = 0  # position of query row 0 inside its block
    turns: tuple[int, ...] = ()  # query rows at which interval ends rise by more than `size`


class RowRuns(NamedTuple):
    """R runs of query rows `first + i * step`, i < count, each with M disjoint key intervals."""

    # first, count: [R], the first query row and the number of query rows of each run
    first: Rows
    count: Rows
    step: int  # distance between neighbouring query rows of a run
    # lo, hi: [R, M], the intervals [lo, hi) of each run's first row, clipped and sorted
    lo: Ends
    hi: Ends
    # lo_step, hi_step: [R, M], 0 or `step`: by how much lo and hi rise per query row
    lo_step: Ends
    hi_step: Ends


def row_runs(
    mask: Mask, q_len: int, kv_len: int, data: bool = True, cuts: int = 0
) -> Iterator[RowRuns]:
    """Yield all query rows of a bound mask as runs, each to be cut into up to `cuts` pieces."""
    blocks = mask.row_blocks()
    way = None if blocks is None else _way(blocks, q_len, cuts)
    if way is not None:
        arrays = any(isinstance(x, np.ndarray | jax.Array) for x in jax.tree.leaves(mask))
        keep = way.pieces <= MOST_KEPT and not arrays  # a mask with arrays has no hash
        yield (_kept if keep else _runs)(mask, way._replace(pieces=0), q_len, kv_len, data)
        return
    for first in range(0, q_len, ROWS):
        rows = np.arange(first, min(first + ROWS, q_len))
        lo, hi = _disjoint(mask, rows, kv_len, data)
        still = np.zeros_like(lo)
        yield RowRuns(rows, np.ones_like(rows), 1, lo, hi, still, still)


class _Way(NamedTuple):
    """How query rows are cut into runs: number of pieces, blocks and rows to cut at, and step."""

    pieces: int
    cut: tuple[RowBlocks, ...]
    turns: tuple[int, ...]
    step: int


def _way(blocks: tuple[RowBlocks, ...], q_len: int, cuts: int) -> _Way | None:
    """Choose how query rows are cut into runs; None if runs would save nothing over single rows.

    A run's step is the least common multiple of small blocks; runs end where a large block ends.
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
    """Cut query rows into runs, and halve each run until its ends stay or move with the row."""
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
    """Return the key intervals of query rows, sorted, clipped and without overlap."""
    found = mask.intervals(rows, np, data)
    if not found:
        nothing = np.zeros((rows.size, 0), np.int64)
        return nothing, nothing
    both = (np.stack(ends, axis=1) for ends in zip(*found, strict=True))
    lo, hi = (np.minimum(ends, kv_len).astype(np.int64) for ends in both)
    lo, hi = np.sort(np.minimum(lo, hi), axis=1), np.sort(hi, axis=1)
    lo[:, 1:] = np.maximum(lo[:, 1:], hi[:, :-1])
    return lo, hi
