"""In which order a GPU goes through the rows of tiles, so that all of it is busy until the end.

A row of tiles is the work of one thread block: all tiles of keys for one tile of queries. A GPU
starts one thread block after the other, head by head, as many at a time as it has SMs. In the end
ever more SMs are idle, for as long as a row takes. So a side of the rows that is light goes last;
and since one head has too few light rows to fill the chip, those of several heads wait for the end.
Other heads keep to themselves: rows of one head read the same keys, and find them in the cache.

Short rows start with those of other heads that are as long. But the next row of a head reads the
same keys, and is to find them in the cache: so many heads as that holds the keys of are a group,
and the groups follow each other.

Or thread blocks are persistent: one runs on each SM and takes a row in each wave, from the first
thread block to the last and back (tile_schedulers.py). That saves the start of each row, and pays
where the rows of a wave are even. Where they are not, or not known to be, each thread block takes
the next row as soon as it is free (dynamic_scheduler.py).

Or an array on the device names the rows, those with most tiles first (block_sparse_rows.py). Rows
of about as many tiles are one class, whose rows start head by head, as above; a row that is a class
of its own starts with all heads after each other, or with all of a group.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxattn.devices import SMS

LIGHT = 0.95  # of the work of a usual row
# What a row costs beside its tiles, in tiles: with a thread block each, and of persistent ones that
# are dealt their rows, or take them.
START, DEALT_START, TAKEN_START = 2, 1, 1.3
MOST_ROWS = 20_000  # of all heads, for which the end of a launch is worked out row by row


class Order(NamedTuple):
    """Say in which order rows are started.

    Attributes:
        backwards: whether the last row comes first.
        light: the number of rows at the end that wait.
        heads: of how many heads, the last ones of the batch, they wait; 0 for all.
        persistent: whether thread blocks are persistent; they take a row in each wave.
        listed: whether an array on the device names the rows in their order; `backwards`, `light`
            and `heads` count for nothing then.
        own_rows: whether that array holds the rows of each batch row, and not rows that all share.
        dynamic: whether persistent thread blocks take the next row as soon as they are free, in
            the place of one in each wave.
        group: how many lanes, heads of the batch, go through all their rows before the next ones
            begin, each row with all of them; a last group has between half as many and one and a
            half times; 0 for no groups. Rows of each batch row have none.
    """

    backwards: bool = False
    light: int = 0
    heads: int = 0
    persistent: bool = False
    listed: bool = False
    own_rows: bool = False
    dynamic: bool = False
    group: int = 0

    def place(self, row: Any, lane: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any]:
        """Return the (row, lane) that is started as the `row`-th one of the `lane`-th head.

        Args:
            row, lane: numbers from 0, lanes over all heads of the batch; ints, arrays of xp, or
                numbers of a kernel.
            rows, lanes: how many there are.
            xp: has `where`, `minimum` and `maximum`.
        """
        if self.group:
            first, many, behind = self._in_group(lane * rows + row, rows, lanes, xp)
            row, lane = behind // many, first + behind % many
        elif self.light:
            row, lane = self._light_last(row, lane, rows, lanes, xp)
        return (rows - 1 - row if self.backwards else row), lane

    def _in_group(self, at: Any, rows: Any, lanes: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Return the first lane of the `at`-th start's group, how many it has, and the place."""
        last = xp.maximum((lanes + self.group // 2) // self.group - 1, 0)
        number = xp.minimum(at // (self.group * rows), last)
        first = number * self.group
        many = xp.where(number == last, lanes - first, self.group)
        return first, many, at - first * rows

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

    def named(
        self, at: Any, rows: Any, sizes: tuple[Any, Any, Any], xp: Any
    ) -> tuple[Any, Any, Any]:
        """Return the (row, head, batch row) that an array names for the `at`-th start.

        Args:
            at: a number from 0, over all rows, heads and batch rows.
            rows: the array [3, R]: rows, or batch row * rows + row where `own_rows`; where the
                class of each begins in it, and how many rows that class has.
            sizes: numbers of rows, heads and batch rows.
            xp: has `where`, `minimum` and `maximum`.
        """
        (count, heads, batch), first = sizes, 0
        each = heads if self.own_rows else heads * batch
        if self.group:
            first, each, at = self._in_group(at, count, each, xp)
        start, size = rows[1, at // each], rows[2, at // each]
        behind = at - start * each
        entry, lane = rows[0, start + behind % size], first + behind // size
        if self.own_rows:
            return entry % count, lane, entry // count
        return entry, lane % heads, lane // heads


def order_of(work: Any, lanes: int, may_persist: bool = False, group: int = 0) -> Order:
    """Choose an order.

    Args:
        work: [rows], the tiles of each row; a numpy array where it is known.
        lanes: heads times batch rows.
        may_persist: whether thread blocks can be persistent.
        group: of lanes, as in `Order`, where thread blocks are persistent; 0 for long rows, which
            persistent ones do not take as soon as they are free.
    """
    if isinstance(work, jax.Array):
        return Order()
    half = len(work) // 2
    backwards = bool(work[len(work) - half :].sum() > work[:half].sum())
    light = _light_rows(work[::-1] if backwards else work)
    # More light rows than a GPU has SMs bring nothing.
    heads = min(lanes, -(-SMS // light)) if light else 0
    orders = [Order(backwards, light, heads)]
    if may_persist:
        dealt = Order(backwards, 0 if group else light, persistent=True, group=group)
        orders = [dealt, *orders, *([dealt._replace(dynamic=True)] if group else [])]
    return _first_to_end(orders, lambda order: _in_order(order, work, lanes))


def named_order(
    work: np.ndarray, rows: np.ndarray, lanes: int, may_persist: bool, group: int
) -> Order:
    """Choose an order of rows that an array names, and all batch rows share.

    Args:
        work: [rows], the tiles of each row.
        rows: the array, as `Order.named` takes it.
        lanes: heads times batch rows.
        may_persist: whether thread blocks can be persistent.
        group: of lanes, as in `Order`, where thread blocks are persistent.
    """
    one_each = Order(listed=True)
    if not may_persist:
        return one_each
    dealt = one_each._replace(persistent=True, group=group)
    # Long rows are here too: a segment's last row is long where the others are short.
    orders = [dealt, one_each, dealt._replace(dynamic=True)]
    return _first_to_end(orders, lambda order: _in_named_order(order, work, rows, lanes))


def _first_to_end(orders: list[Order], started: Callable[[Order], np.ndarray]) -> Order:
    """Return the order whose last row ends first, from the work of the rows as each starts them."""
    if len(orders) == 1:
        return orders[0]
    return min(orders, key=lambda order: _end_of(order, started(order)))


def _light_rows(rows: np.ndarray) -> int:
    """Count the rows after the last one of usual work."""
    usual = np.flatnonzero(rows >= LIGHT * np.median(rows))
    return len(rows) - 1 - int(usual[-1])


def at_wave(wave: Any, block: Any, blocks: Any, xp: Any) -> Any:
    """Return the place in the order that a persistent thread block takes in a wave.

    Every other wave goes backwards.
    """
    return wave * blocks + xp.where(wave % 2 == 0, block, blocks - 1 - block)


def _in_order(order: Order, work: np.ndarray, lanes: int) -> np.ndarray:
    at = np.arange(len(work) * lanes)
    return work[order.place(at % len(work), at // len(work), len(work), lanes, np)[0]]


def _in_named_order(order: Order, work: np.ndarray, rows: np.ndarray, lanes: int) -> np.ndarray:
    at = np.arange(len(work) * lanes)
    return work[order.named(at, rows, (len(work), lanes, 1), np)[0]]


def _end_of(order: Order, work: np.ndarray) -> float:
    """Return when the last row ends, in tiles, from the work of the rows in their order."""
    if order.dynamic:
        return _end_taken(work + TAKEN_START)
    return _end_dealt(work + DEALT_START) if order.persistent else _end_taken(work + START)


def _end_dealt(each: np.ndarray) -> float:
    """Return when the last persistent thread block ends that is dealt its rows."""
    waves = -(-len(each) // SMS)
    at = at_wave(np.arange(waves)[:, None], np.arange(SMS), SMS, np)
    return float(np.append(each, np.zeros(waves * SMS - len(each)))[at].sum(axis=0).max())


def _end_taken(each: np.ndarray) -> float:
    """Return when the last row ends, where each SM takes the next row as soon as it is free."""
    if len(each) > MOST_ROWS:
        return float(each.sum() / SMS + each.max() / 2)
    ends = [0.0] * SMS
    for row in each.tolist():
        heapq.heapreplace(ends, ends[0] + row)
    return max(ends)
