"""What `auto` takes on the calls of a grid, over the best that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxattn.kernels.auto.choose import choose_kernel
from maxattn.target import Target
from maxattn.tools.bench.grid.fit import call_of
from maxattn.tools.bench.grid.left_out import Regret
from maxattn.tools.bench.grid.rows import GridRow, is_ours
from maxattn.tools.bench.row import BOTH

SHOWN = 10
NONE_MS = 3e-3  # a difference up to which nobody could tell, and measurements cannot either


class Times(NamedTuple):
    """Hold milliseconds of what was taken, and of the best."""

    taken: float
    best: float

    @property
    def ratio(self) -> float:
        """What is taken over the best."""
        return self.taken / self.best

    @property
    def beyond_none(self) -> float:
        """The same, and 1 where the difference is as good as none."""
        return 1.0 if self.taken - self.best <= NONE_MS else self.ratio


class Chosen(NamedTuple):
    """Hold what `auto` takes on one call, and its times: of forward and of both."""

    name: str
    call: str
    forward: Times
    both: Times

    @property
    def line(self) -> str:
        """Print it."""
        return f"  {self.forward.ratio:7.3f} {self.both.ratio:7.3f}  {self.name:28} {self.call}"

    @property
    def worst(self) -> float:
        """The larger ratio."""
        return max(self.forward.ratio, self.both.ratio)


def against_best(rows: Sequence[GridRow], target: Target) -> str:
    """Return a table: the calls on which `auto` is furthest from the best, and how far over all.

    Args:
        rows: measured on the target.
        target: whose plans are made.
    """
    chosen = [each for row in rows if (each := _of(row, target)) is not None]
    if not chosen:
        return "nothing was measured that auto takes"
    worst = sorted(chosen, key=lambda each: -each.worst)[:SHOWN]
    head = "  forward    both  auto takes                   B,T,S,N,H"
    of = f"auto over the best, {len(chosen)} of {len(rows)} calls"
    none = f"the same, differences up to {1e3 * NONE_MS:.0f} us counted as none"
    found = [_regret(chosen, "ratio").line(of), _regret(chosen, "beyond_none").line(none)]
    return "\n".join([head, *(each.line for each in worst), *found])


def _regret(chosen: Sequence[Chosen], kind: str) -> Regret:
    passes = ([each.forward for each in chosen], [each.both for each in chosen])
    return Regret(*(np.sort([getattr(times, kind) for times in its]) for its in passes))


def _of(row: GridRow, target: Target) -> Chosen | None:
    """Hold a choice against the best; None where its kernel was not measured."""
    name = choose_kernel(call_of(row), target).name
    first, second = name.split("/") if "/" in name else (name, name)
    if first not in row.forward or second not in row.backward:
        return None
    forward, backward = row.forward[first], row.backward[second]
    ours = min(ms for who, ms in row.forward.items() if is_ours(who)) + min(row.backward.values())
    best = min(ours, *row.times.get(BOTH, {}).values(), float("inf"))
    alone = Times(forward, min(row.forward.values()))
    return Chosen(name, row.call.name, alone, Times(forward + backward, best))
