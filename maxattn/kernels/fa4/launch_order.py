"""In which order a GPU goes through the rows of tiles, so that all of it is busy until the end.

A GPU starts one row of tiles after the other, head by head, as many at a time as it has processors.
In the end ever more of them are idle, for as long as a row takes. So a side of the rows that is
light goes last; and since one head has too few light rows to fill the chip, those of several heads
wait for the end. Other heads keep to themselves: rows of one head read the same keys, and find them
in the cache.

Or blocks of threads stay, one on each processor, and take the rows in turns, from the first block
to the last and back (tile_schedulers.py). That saves the start of each row, where the turns are
even.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import jax
import numpy as np

from maxattn.devices import DEVICES

PROCESSORS = DEVICES["NVIDIA H200"].sms  # more light rows than these bring nothing
LIGHT = 0.95  # of the work of a usual row
START = 2  # what a row costs beside its tiles, in tiles, with a block of threads each
STAY_START = 1  # the same where they stay
MOST = 20_000  # rows of all heads, for which the end of a run is worked out row by row


class Order(NamedTuple):
    """Which rows are started last.

    Attributes:
        backwards: whether the last row comes first.
        light: the number of rows at the end that wait.
        heads: of how many heads, the last ones of the batch, they wait; 0 for all.
        stays: whether blocks of threads stay and take rows in turns.
    """

    backwards: bool = False
    light: int = 0
    heads: int = 0
    stays: bool = False

    def place(self, row: Any, lane: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (row, lane) of tiles that is started as the `row`-th one of the `lane`-th head
        of the batch.

        Args:
            row, lane: numbers from 0; ints, arrays of xp, or numbers of a kernel.
            rows, lanes: how many there are.
            xp: has `where`.
        """
        if self.light:
            row, lane = self._light_last(row, lane, rows, lanes, xp)
        return (rows - 1 - row if self.backwards else row), lane

    def _light_last(self, row: Any, lane: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        heads = self.heads or lanes
        heavy, first = rows - self.light, lanes - heads
        at = (lane - first) * rows + row  # among the heads whose light rows wait
        late = at - heavy * heads
        waits = late >= 0
        new_row = xp.where(waits, heavy + late // heads, at % heavy)
        new_lane = first + xp.where(waits, late % heads, at // heavy)
        ours = lane >= first
        return xp.where(ours, new_row, row), xp.where(ours, new_lane, lane)


def order_of(work: Any, lanes: int, may_stay: bool = False) -> Order:
    """Choose an order.

    Args:
        work: [rows], the tiles of each row; a numpy array where it is known.
        lanes: heads times batch rows.
        may_stay: whether blocks of threads can stay.
    """
    if isinstance(work, jax.Array):
        return Order()
    half = len(work) // 2
    backwards = bool(work[len(work) - half :].sum() > work[:half].sum())
    rows = work[::-1] if backwards else work
    usual = np.flatnonzero(rows >= LIGHT * np.median(rows))
    light = len(rows) - 1 - int(usual[-1])
    heads = min(lanes, -(-PROCESSORS // light)) if light else 0
    starting, staying = Order(backwards, light, heads), Order(backwards, light, stays=True)
    if may_stay and _end_staying(staying, work, lanes) <= _end_starting(starting, work, lanes):
        return staying
    return starting


def at_turn(turn: Any, block: Any, blocks: Any, xp: Any) -> Any:
    """Return the place in the order that a staying block of threads takes in a turn: every other
    goes backwards.
    """
    return turn * blocks + xp.where(turn % 2 == 0, block, blocks - 1 - block)


def _in_order(order: Order, work: np.ndarray, lanes: int) -> np.ndarray:
    at = np.arange(len(work) * lanes)
    return work[order.place(at % len(work), at // len(work), len(work), lanes, np)[0]]


def _end_staying(order: Order, work: np.ndarray, lanes: int) -> float:
    """Return when the last staying block ends, in tiles."""
    each = _in_order(order, work, lanes) + STAY_START
    turns = -(-len(each) // PROCESSORS)
    at = at_turn(np.arange(turns)[:, None], np.arange(PROCESSORS), PROCESSORS, np)
    return float(np.append(each, np.zeros(turns * PROCESSORS - len(each)))[at].sum(axis=0).max())


def _end_starting(order: Order, work: np.ndarray, lanes: int) -> float:
    """Return when the last row ends, where each processor takes the next row as soon as it is
    free.
    """
    each = _in_order(order, work, lanes) + START
    if len(each) > MOST:
        return float(each.sum() / PROCESSORS + each.max() / 2)
    ends = [0.0] * PROCESSORS
    for row in each.tolist():
        heapq.heapreplace(ends, ends[0] + row)
    return max(ends)
