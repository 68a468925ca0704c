"""What fitted costs are worth: errors and choices on rows that are left out of the fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from maxattn.devices import Device
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD
from maxattn.kernels.auto.measured import MeasuredShape, fastest_first, mask_kind, nearest
from maxattn.kernels.auto.predict import FittedCosts, Margins
from maxattn.tools.bench.grid.fit import (
    NearSettings,
    Sample,
    call_of,
    fitted,
    fold_numbers,
    samples,
)
from maxattn.tools.bench.grid.rows import GridRow, is_ours

FOLDS = 10
SAME = 3e-3  # ms, up to which two times are the same
# Of near calls: none, then how far they reach and how much of one call's time is chance.
NEAR = (None, *(NearSettings(*each) for each in ((1, 0.1), (2, 0.05), (2, 0.1), (4, 0.1))))
ALIKE = 7e-4  # of mean regrets of settings that choose about as well
MARGINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
NO_COSTS = FittedCosts({})
Chooser = Callable[[GridRow, str], str]
"""Names the kernel of a row's pass that it would take."""


class Regret(NamedTuple):
    """Say what a choice costs: times of what it takes over the best, sorted.

    Attributes:
        forward, both: of forwards alone, and of forward and backward together.
    """

    forward: np.ndarray
    both: np.ndarray

    @property
    def mean(self) -> float:
        """The mean over calls and both; 1 where no call was judged."""
        return float(self.forward.mean() + self.both.mean()) / 2 if len(self.both) else 1.0

    def line(self, of: str) -> str:
        """Say the median, the 95th percentile and the worst."""
        if not len(self.both):
            return f"{of}: no call was judged"
        found = {"forward": self.forward, "forward+backward": self.both}
        parts = (
            f"{what} median {np.median(x):.3f}, 95% {np.quantile(x, 0.95):.3f}, worst {x[-1]:.3f}"
            for what, x in found.items()
        )
        return f"{of}: {'; '.join(parts)}"


class LeftOut(NamedTuple):
    """Hold what weights say of calls that they were not fitted on.

    Attributes:
        errors: relative, by (kernel, pass).
        predicted: ms by (row, kernel, pass).
        nearest: by row, how near the nearest call of other folds is.
    """

    errors: dict[tuple[str, str], np.ndarray]
    predicted: dict[tuple[int, str, str], float]
    nearest: dict[int, float]

    @property
    def median(self) -> float:
        """The median relative error of all."""
        return float(np.median(np.concatenate(list(self.errors.values()))))

    @property
    def lines(self) -> list[str]:
        """Say the errors of each kernel and pass."""
        return [
            f"{name} {what}: {len(x)} times, median error {np.median(x):.1%}, 95% "
            f"{np.quantile(x, 0.95):.1%}, worst {x[-1]:.1%}"
            for (name, what), x in self.errors.items()
        ]


def left_out(
    found: Sequence[Sample], folds: int = FOLDS, near: NearSettings | None = None
) -> LeftOut:
    """Predict each row by costs that are fitted on the rows of other folds."""
    folds = min(folds, len({s.fold for s in found}))
    errors: dict[tuple[str, str], list[float]] = {}
    predicted, nearest = {}, {}
    for fold in range(folds):
        costs = fitted([s for s in found if s.fold % folds != fold], near)
        for s in (s for s in found if s.fold % folds == fold):
            if (ms := s.predicted(costs)) is None:
                continue
            if s.row not in nearest:
                nearest[s.row] = costs.nearest(s.call)
            predicted[s.row, s.kernel, s.what] = ms
            errors.setdefault((s.kernel, s.what), []).append(abs(ms / s.ms - 1))
    return LeftOut({key: np.sort(x) for key, x in errors.items()}, predicted, nearest)


def regret(rows: Sequence[GridRow], choose: Chooser) -> Regret:
    """Return what a choice costs on measured rows.

    Args:
        rows: of a grid.
        choose: of each row and pass.
    """
    forward, both = [], []
    for row in rows:
        times = {what: _ours(row.times[what]) for what in (FORWARD, BACKWARD)}
        if min(map(len, times.values())) < 2:
            continue  # of one kernel there is no choice to judge
        if times[FORWARD].keys() != times[BACKWARD].keys():
            continue  # the best of what is missing is not known
        taken = [times[what][choose(row, what)] for what in times]
        best = [min(times[what].values()) for what in times]
        forward.append(over(taken[0], best[0]))
        both.append(over(sum(taken), sum(best)))
    return Regret(np.sort(forward), np.sort(both))


def over(taken: float, best: float) -> float:
    """Return a time over the best, in ms; 1 where they differ by less than two runs may."""
    return taken / best if taken - best > SAME else 1.0


def _ours(times: dict[str, float]) -> dict[str, float]:
    return {name: ms for name, ms in times.items() if is_ours(name)}


def by_prediction(rows: Sequence[GridRow], out: LeftOut, costs: FittedCosts = NO_COSTS) -> Chooser:
    """Take the smallest of predicted times.

    Args:
        rows: of a grid.
        out: what is predicted of them.
        costs: whose usual kernel has margins.
    """
    at = {id(row): i for i, row in enumerate(rows)}

    def choose(row: GridRow, what: str) -> str:
        number = at[id(row)]
        keys = {name: (number, name, what) for name in _ours(row.times[what])}
        known = {name: out.predicted[key] for name, key in keys.items() if key in out.predicted}
        return costs.ranked(known, what, out.nearest.get(number, 0.0))[0][0]

    return choose


def by_nearest(rows: Sequence[GridRow], others: Callable[[GridRow], Sequence[GridRow]]) -> Chooser:
    """Take the fastest at the nearest shape of other rows, as `auto` does without costs.

    Args:
        rows: of a grid.
        others: the rows that a row is looked up in.
    """
    shapes = {id(row): measured_shape(row) for row in rows}

    def choose(row: GridRow, what: str) -> str:
        shape = nearest(call_of(row), tuple(shapes[id(other)] for other in others(row)))
        ranked = shape.forward if what == FORWARD else shape.backward
        here = _ours(row.times[what])
        return next((name for name, _ in ranked if name in here), next(iter(here)))

    return choose


def always(name: str) -> Chooser:
    """Take one kernel wherever it was measured, else the slowest."""

    def choose(row: GridRow, what: str) -> str:
        here = _ours(row.times[what])
        return name if name in here else max(here, key=lambda other: here[other])

    return choose


def measured_shape(row: GridRow) -> MeasuredShape:
    """Return a row as the table holds a shape."""
    b, t, s, n, _, h = row.call.sizes
    forward, backward = (fastest_first(_ours(row.times[what])) for what in (FORWARD, BACKWARD))
    return MeasuredShape((b, t, s, n, h), mask_kind(call_of(row)), forward, backward)


class Fit(NamedTuple):
    """Hold fitted costs and what they are worth.

    Attributes:
        costs: fitted on all rows.
        text: errors and regrets of rows left out, for people.
    """

    costs: FittedCosts
    text: str


class ChoiceSettings(NamedTuple):
    """Say how predictions choose: corrected by near calls, and against which margins."""

    near: NearSettings | None
    margins: Margins

    @property
    def reach(self) -> float:
        """How far near calls reach; without them the costs of one call are those of all."""
        return self.near.reach if self.near else math.inf

    def named(self, usual: str) -> str:
        """Spell it."""
        of = self.near
        near = f", calls within {of.reach:g} doublings (ridge {of.ridge:g})" if of else ""
        return f"{self.margins.of(usual)}{near}"


def _best(regrets: dict[ChoiceSettings, Regret]) -> ChoiceSettings:
    """Return the settings that choose best: of those about as good, near calls reach least far.

    A wide reach shifts predictions of calls that none was measured near.
    """
    most = min(its.mean for its in regrets.values()) + ALIKE
    good = [settings for settings, its in regrets.items() if its.mean <= most]
    return min(good, key=lambda each: (each.reach, regrets[each].mean))


def fit(rows: Sequence[GridRow], device: Device, folds: int = FOLDS) -> Fit:
    """Fit costs, and compare them with the nearest measured shape on rows left out.

    Args:
        rows: of a grid, on devices of one family.
        device: of rows that name none.
        folds: in how many parts the rows are left out.
    """
    found, folds = samples(rows, device), min(folds, len(set(fold_numbers(rows))))
    alone = {name: regret(rows, always(name)) for name in {s.kernel for s in found}}
    usual = min(alone, key=lambda name: alone[name].mean)
    tried = {near: left_out(found, folds, near) for near in NEAR}
    margins = [Margins(*each) for each in product(MARGINS, MARGINS)]
    choosing = [replace(NO_COSTS, usual=usual, margins=each) for each in margins]
    regrets = {
        ChoiceSettings(near, costs.margins): regret(rows, by_prediction(rows, its, costs))
        for near, its in tried.items()
        for costs in choosing
    }
    best = _best(regrets)
    at = {id(row): n for row, n in zip(rows, fold_numbers(rows), strict=True)}

    def other_folds(row: GridRow) -> list[GridRow]:
        return [other for other in rows if at[id(other)] % folds != at[id(row)] % folds]

    others = {
        "the nearest measured shape": regret(rows, by_nearest(rows, other_folds)),
        f"{usual} always": alone[usual],
    }
    decides = all(regrets[best].mean <= other.mean for other in others.values())
    counts = {"error": tried[best.near].median, "calls": len(rows), "decides": decides}
    lines = [
        f"{len(rows)} calls, each predicted by costs fitted without it ({folds} folds)",
        *tried[best.near].lines,
        regrets[ChoiceSettings(None, Margins())].line("the smallest prediction"),
        regrets[best].line(f"taken: {best.named(usual)}"),
        *(other.line(name) for name, other in others.items()),
        *([] if decides else ["the nearest measured shape decides"]),
    ]
    chosen = {"usual": usual, "margins": best.margins}
    return Fit(replace(fitted(found, best.near), **counts, **chosen), "\n".join(lines))
