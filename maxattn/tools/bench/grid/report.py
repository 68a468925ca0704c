"""What `auto` takes on the calls of a grid, over the best that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxattn.kernels.auto.choose import choose_kernel
from maxattn.target import Target
from maxattn.tools.bench.grid.fit import call_of
from maxattn.tools.bench.grid.left_out import SAME, Regret, over
from maxattn.tools.bench.grid.rows import GridRow, is_ours
from maxattn.tools.bench.row import BOTH

SHOWN = 10


class Chosen(NamedTuple):
    """Hold what `auto` takes on one call: its time over the best, of forward and of both."""

    name: str
    call: str
    forward: float
    both: float

    @property
    def line(self) -> str:
        """Print it."""
        return f"  {self.forward:7.3f} {self.both:7.3f}  {self.name:28} {self.call}"


def against_best(rows: Sequence[GridRow], target: Target) -> str:
    """Return a table: the calls on which `auto` is furthest from the best, and how far over all.

    Args:
        rows: measured on the target.
        target: whose plans are made.
    """
    chosen = [each for row in rows if (each := _of(row, target)) is not None]
    if not chosen:
        return "nothing was measured that auto takes"
    worst = sorted(chosen, key=lambda each: -max(each.forward, each.both))[:SHOWN]
    found = Regret(*(np.sort([each[i] for each in chosen]) for i in (2, 3)))
    head = "  forward    both  auto takes                   B,T,S,N,H"
    of = f"auto over the best, {len(chosen)} of {len(rows)} calls"
    same = f"differences up to {1e3 * SAME:.0f} us count as none"
    return "\n".join([head, *(each.line for each in worst), found.line(of), same])


def _of(row: GridRow, target: Target) -> Chosen | None:
    """Hold a choice against the best; None where its kernel was not measured."""
    name = choose_kernel(call_of(row), target).name
    first, second = name.split("/") if "/" in name else (name, name)
    if first not in row.forward or second not in row.backward:
        return None
    forward, backward = row.forward[first], row.backward[second]
    ours = min(ms for who, ms in row.forward.items() if is_ours(who)) + min(row.backward.values())
    best = min(ours, *row.times.get(BOTH, {}).values(), float("inf"))
    ratio = over(forward, min(row.forward.values()))
    return Chosen(name, row.call.name, ratio, over(forward + backward, best))
