"""Work items of thread blocks: what each computes, the order of their starts, and the makespan.

An *item* is (tile row, lane, first, last). A tile row is a query tile in a forward and a key tile
in a backward. A lane is the index of a (batch row, query head) pair. The item's steps [first, last)
are the tiles of the other operand, or entries of the tile row's list. If all tile rows have equally
many steps, a formula gives the items (`Cut`); else an int32 array [n, 4] lists them.

Long items start first (LPT, longest processing time). Lanes start in groups whose keys and values
fit the L2 cache, so that the items of a group read keys and values from L2.

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

ALL = -1  # the value of `tail` if every tile row is cut
MOST_PLAYED = 4_096  # most items whose makespan is simulated; of more items it is estimated
LEAST_GAIN, LEAST_US = 0.02, 2.0  # a cut's least gain, as a share and in microseconds


class Cut(NamedTuple):
    """Which tile rows are cut, and the items of tile rows of equal numbers of steps."""

    tail: int = 0  # how many of each lane's last tile rows are cut; `ALL` for every tile row
    splits: int = 1  # number of splits of each tile row that is cut

    def count(self, rows: Any, lanes: Any) -> Any:
        tail = rows if self.tail == ALL else self.tail
        return (rows - tail + tail * self.splits) * lanes

    def place(self, at: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (tile row, lane) of an item; whole items come lane by lane, then splits.

        Args:
            at: the item's index, as a numpy number or a number inside a kernel.
            rows, lanes: the numbers of tile rows and lanes.
            xp: numpy, or `Numbers` inside a kernel.
        """
        if self.tail in (0, ALL):
            return at % rows, at // rows
        first, whole = rows - self.tail, (rows - self.tail) * lanes
        late, is_split = at - whole, at >= whole
        row = xp.where(is_split, first + late % self.tail, at % first)
        return row, xp.where(is_split, late // self.tail, at // first)

    def steps(self, row: Any, lane: Any, rows: Any, lanes: Any, steps: Any, xp: Any) -> Any:
        """Return an item's steps [first, end), of the `steps` of its whole tile row."""
        if self.tail == 0:
            return 0, steps
        split = lane // lanes
        ends = split * steps // self.splits, (split + 1) * steps // self.splits
        if self.tail == ALL:
            return ends
        is_split = row >= rows - self.tail
        return xp.where(is_split, ends[0], 0), xp.where(is_split, ends[1], steps)


def items(work: Any, lanes: tuple[int, int], group: int, splits: int = 1) -> Any:
    """Return the items [n, 4] of tile rows with lists: group after group, longest items first.

    Args:
        work: number of steps of each tile row, [rows], or [B, rows] if batch rows differ; a
            numpy array if it is known when tracing.
        lanes: numbers of batch rows and of query heads.
        group: number of lanes that start together; it divides the number of heads if batch rows
            differ, else the number of lanes.
        splits: number of splits of every tile row.
    """
    xp: Any = jnp if isinstance(work, jax.Array) else np
    (batch, heads), rows = lanes, work.shape[-1]
    each = heads if work.ndim == 2 else batch * heads
    flat = work.reshape(-1)
    # The low bits of a key are the tile row's index: sorting one array takes a single launch.
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
    """Return the makespan if each SM, when free, takes the longest item that is left.

    Args:
        times: [rows], the time of an item of each tile row.
        lanes: number of items of each tile row.
        sms: number of streaming multiprocessors.
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


def best_cut(
    steps: np.ndarray,
    lanes: int,
    sms: int,
    time_of: Callable[[np.ndarray, int], np.ndarray],
    merge: Callable[[int, int], float],
    most: int,
    tails: bool,
) -> tuple[float, Cut]:
    """Choose what to cut: nothing, all tile rows, or the tile rows after the last full wave.

    Return the makespan with the merge, in microseconds, and the cut.

    Args:
        steps: number of steps of each tile row, [rows]; the last tile rows are cut first.
        lanes: number of items of each tile row.
        sms: number of streaming multiprocessors.
        time_of: returns the items' times, from their numbers of steps and the number of items.
        merge: returns the time of the merge, from the numbers of cut tile rows and of splits.
        most: the largest number of splits.
        tails: whether only the last tile rows can be cut; else all or none are cut.
    """
    rows = len(steps)
    whole = end_of(time_of(steps, rows * lanes), lanes, sms)
    best, full = (whole, Cut()), rows * lanes // sms * sms // lanes
    for keep in {full, 0} if tails and full < rows else {0}:
        head, tail = steps[:keep], steps[keep:]
        first = end_of(time_of(head, keep * lanes), lanes, sms)
        for splits in range(2, min(int(tail.max()), most) + 1):
            blocks = len(tail) * lanes * splits
            last = end_of(time_of(-(-tail // splits), blocks), lanes * splits, sms)
            end = first + last + merge(len(tail), splits)
            best = min(best, (end, Cut(len(tail) if keep else ALL, splits)))
    gains = best[0] <= min((1 - LEAST_GAIN) * whole, whole - LEAST_US)
    return best if gains else (whole, Cut())
