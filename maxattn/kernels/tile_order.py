"""In which order a GPU goes through the rows of tiles, so that all of it is busy until the end.

A GPU starts one row of tiles after the other, head by head, as many at a time as it has processors. In the end ever
more of them are idle, for as long as a row takes. So a side of the rows that is light goes last; and since one head has
too few light rows to fill the chip, those of several heads wait for the end. Other heads keep to themselves: rows of
one head read the same keys, and find them in the cache.

Or blocks of threads stay, one on each processor, and take the rows in turns, from the first block to the last and back
(fa4_kernels.py). That saves the start of each row, where the turns are even.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

PROCESSORS = 132  # of an H100 or H200; more light rows than these bring nothing
LIGHT = 0.95  # of the work of a usual row
START = 1  # what a row costs beside its tiles, in tiles, where blocks of threads stay


class Order(NamedTuple):
    """Which rows are started last.

    Attributes:
        backwards: whether the last row comes first.
        light: the number of rows at the end that wait.
        heads: of how many heads, the last ones of the batch, they wait.
        stays: whether blocks of threads stay and take rows in turns.
    """

    backwards: bool = False
    light: int = 0
    heads: int = 1
    stays: bool = False

    def place(self, row: Any, lane: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (row, lane) of tiles that is started as the `row`-th one of the `lane`-th head of the batch.

        Args:
            row, lane: numbers from 0; ints, arrays of xp, or numbers of a kernel.
            rows, lanes: how many there are.
            xp: has `where`.
        """
        if self.light:
            row, lane = self._light_last(row, lane, rows, lanes, xp)
        return (rows - 1 - row if self.backwards else row), lane

    def _light_last(self, row: Any, lane: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        heavy, first = rows - self.light, lanes - self.heads
        at = (lane - first) * rows + row  # among the heads whose light rows wait
        late = at - heavy * self.heads
        waits = late >= 0
        new_row = xp.where(waits, heavy + late // self.heads, at % heavy)
        new_lane = first + xp.where(waits, late % self.heads, at // heavy)
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
    staying = Order(backwards, light, lanes, stays=True)
    if may_stay and _is_even(staying, work, lanes):
        return staying
    return Order(backwards, light, min(lanes, -(-PROCESSORS // light))) if light else Order(backwards)


def _is_even(order: Order, work: np.ndarray, lanes: int) -> bool:
    """Tell whether staying blocks end at about the same time, within one row: no order promises more."""
    at = np.arange(len(work) * lanes)
    row, _ = order.place(at % len(work), at // len(work), len(work), lanes, np)
    turn, block = at // PROCESSORS, at % PROCESSORS
    block = np.where(turn % 2 == 0, block, PROCESSORS - 1 - block)
    ends = np.bincount(block, weights=work[row] + START, minlength=PROCESSORS)
    return bool(ends.max() <= ends.mean() + work.max())
