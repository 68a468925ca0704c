"""What thread blocks do: items, the order in which they start, and when the last one ends.

An *item* is (tile row, lane, first, last). A tile row is a tile of queries in a forward and of keys
in a backward, a lane is a head of a batch row, and first and last bound its steps: the tiles on the
other side, or the entries of its list. Items that are all alike are arithmetic (`Uniform`); others
are an int32 array [n, 4].

Long items start first (LPT). Lanes start in groups whose keys and values fit the L2 cache: the
items of a group that start together read the same ones.

An item may be *cut* into splits of its steps, so that fewer SMs (streaming multiprocessors) wait
at the end: split-K in a forward, split-Q in a backward. A split has its own lane number: split p of
lane l is lane `p * lanes + l`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ALL = -1  # every tile row is cut
MOST_PLAYED = 4_096  # items whose makespan is worked out one by one
LEAST_GAIN, LEAST_US = 0.02, 2.0  # of a cut; a prediction is no more exact


class Uniform(NamedTuple):
    """The items of a launch whose tile rows all have the same number of steps.

    Attributes:
        tail: the last tile rows of each lane, which are cut; `ALL` for all.
        splits: of each tile row that is cut.
    """

    tail: int = 0
    splits: int = 1

    def count(self, rows: Any, lanes: Any) -> Any:
        """Count the items."""
        tail = rows if self.tail == ALL else self.tail
        return (rows - tail + tail * self.splits) * lanes

    def place(self, at: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (tile row, lane) of the `at`-th item: whole ones lane by lane, then splits.

        Args:
            at: a number from 0; of numpy or of a kernel.
            rows, lanes: how many there are.
            xp: has `where`.
        """
        if self.tail in (0, ALL):
            return at % rows, at // rows
        first, whole = rows - self.tail, (rows - self.tail) * lanes
        late, is_split = at - whole, at >= whole
        row = xp.where(is_split, first + late % self.tail, at % first)
        return row, xp.where(is_split, late // self.tail, at // first)

    def steps(self, row: Any, lane: Any, rows: Any, lanes: Any, steps: Any, xp: Any) -> Any:
        """Return the range [first, end) of an item; `steps`: of its whole tile row."""
        if self.tail == 0:
            return 0, steps
        split = lane // lanes
        ends = split * steps // self.splits, (split + 1) * steps // self.splits
        if self.tail == ALL:
            return ends
        is_split = row >= rows - self.tail
        return xp.where(is_split, ends[0], 0), xp.where(is_split, ends[1], steps)


def items(work: Any, lanes: tuple[int, int], group: int, splits: int = 1) -> Any:
    """Return the items [n, 4] of tile rows with lists, longest first in groups of lanes.

    Args:
        work: number of steps of each tile row, [rows], or [B, rows] if batch rows differ; a
            numpy array if it is known when tracing.
        lanes: batch rows and heads.
        group: lanes that start together; it divides the heads of a batch row if batch rows
            differ, else all lanes.
        splits: of every tile row.
    """
    xp: Any = jnp if isinstance(work, jax.Array) else np
    (batch, heads), rows = lanes, work.shape[-1]
    each = heads if work.ndim == 2 else batch * heads
    flat = work.reshape(-1)
    # The number of a row stands behind its steps, so that one array is sorted: a single launch.
    bits = max(1, (flat.shape[0] - 1).bit_length())
    most = flat.max() if xp is np else 2 ** (30 - bits)
    keys = (xp.clip(most - flat, 0, most) << bits) | xp.arange(flat.shape[0], dtype=np.int32)
    order = xp.sort(keys) & ((1 << bits) - 1)
    shape = each // group, flat.shape[0], splits, group
    start, entry, split, lane = (
        xp.arange(n, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(4)])
        for axis, n in enumerate(shape)
    )
    entry = order[entry]
    lane = entry // rows * heads + start * group + lane + split * (batch * heads)
    ends = (flat[entry] * split // splits, flat[entry] * (split + 1) // splits)
    found = [xp.broadcast_to(x, shape).reshape(-1) for x in (entry % rows, lane, *ends)]
    return xp.stack(found, axis=1).astype(np.int32)


def group_of(lanes: int, bytes_each: float, cache: float) -> int:
    """Return how many lanes start together: the largest divisor of `lanes` that fits the cache."""
    fits = max(1, int(cache // max(1.0, bytes_each)))
    return lanes if lanes <= fits else max(n for n in range(1, fits + 1) if lanes % n == 0)


def end_of(times: np.ndarray, lanes: int, sms: int) -> float:
    """Return the makespan of items that free SMs take in turn, longest first.

    Args:
        times: [rows], how long an item of each tile row takes.
        lanes: items of each tile row.
        sms: streaming multiprocessors.
    """
    count = len(times) * lanes
    if not count:
        return 0.0
    if times.min() == times.max():
        return -(-count // sms) * float(times[0])
    mean, longest = float(times.sum()) * lanes / sms, float(times.max())
    if count > MOST_PLAYED:
        return max(mean + longest / 2, longest)
    free = [0.0] * sms
    for time in np.sort(times)[::-1].repeat(lanes).tolist():
        heapq.heapreplace(free, free[0] + time)
    return max(free)


class Cut(NamedTuple):
    """Which tile rows are cut, and the makespan that results.

    Attributes:
        end: makespan, merge included, in microseconds.
        tail: the last tile rows of each lane; `ALL` for all, 0 for none.
        splits: of each of those.
    """

    end: float
    tail: int = 0
    splits: int = 1


def cut(
    steps: np.ndarray,
    lanes: int,
    sms: int,
    time_of: Callable[[np.ndarray, int], np.ndarray],
    merge: Callable[[int, int], float],
    most: int,
    tails: bool,
) -> Cut:
    """Choose what to cut: nothing, all tile rows, or those after the last full wave.

    Args:
        steps: steps of each tile row, [rows]; those after the last full wave are at the end.
        lanes: items of each tile row.
        sms: streaming multiprocessors.
        time_of: from (steps of items, number of items that run), the times of the items.
        merge: from (cut tile rows, splits), the time that their merge takes.
        most: the largest number of splits.
        tails: whether a part of the tile rows can be cut.
    """
    rows = len(steps)
    whole = end_of(time_of(steps, rows * lanes), lanes, sms)
    best, full = Cut(whole), rows * lanes // sms * sms // lanes
    for keep in {full, 0} if tails and full < rows else {0}:
        head, tail = steps[:keep], steps[keep:]
        first = end_of(time_of(head, keep * lanes), lanes, sms)
        for splits in range(2, min(int(tail.max()), most) + 1):
            blocks = len(tail) * lanes * splits
            last = end_of(time_of(-(-tail // splits), blocks), lanes * splits, sms)
            end = first + last + merge(len(tail), splits)
            best = min(best, Cut(end, len(tail) if keep else ALL, splits))
    gains = best.end <= min((1 - LEAST_GAIN) * whole, whole - LEAST_US)
    return best if gains else Cut(whole)
