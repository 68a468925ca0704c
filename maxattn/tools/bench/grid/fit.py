"""Fit the weights of `auto`'s costs to measured rows, and hold them against rows left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from maxattn.call import Call
from maxattn.devices import Device
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD, Terms, terms
from maxattn.kernels.auto.gpu import MeasuredShape, fastest_first, mask_kind, nearest
from maxattn.kernels.auto.predict import HEAD_CLASSES, FittedCosts, Key, head_class, weighed
from maxattn.tools.bench.grid.rows import GridRow, is_ours

OTHER_CLASSES = 0.1  # the say of other head dims, where few calls have one's own
ROUNDS, LEAST_ERROR = 6, 0.02
FOLDS = 10
Chooser = Callable[[GridRow, str], str]
"""Names the kernel of a row's pass that it would take."""


class Sample(NamedTuple):
    """Hold one measured time: whose, of which head class, its terms, ms, and which row's."""

    kernel: str
    what: str
    heads: int
    terms: Terms
    ms: float
    row: int


def samples(rows: Sequence[GridRow], device: Device) -> list[Sample]:
    """Return every measured time with its terms.

    Args:
        rows: of a grid.
        device: that they were measured on.
    """
    found = []
    for at, row in enumerate(rows):
        call = row.call.shape().call()
        found += [
            Sample(name, what, head_class(call.head_dim), terms(name, what, call, device), ms, at)
            for what in (FORWARD, BACKWARD)
            for name, ms in row.times[what].items()
            if is_ours(name)
        ]
    return found


def fitted(found: Iterable[Sample]) -> dict[Key, Terms]:
    """Fit weights that are not negative, by relative error."""
    by_pass: dict[tuple[str, str], list[Sample]] = {}
    for sample in found:
        by_pass.setdefault((sample.kernel, sample.what), []).append(sample)
    return {
        (*key, heads): _fit(its, heads) for key, its in by_pass.items() for heads in HEAD_CLASSES
    }


def _fit(found: list[Sample], heads: int) -> Terms:
    """Fit one class: its own samples, and the others' with less weight."""
    names = sorted({name for sample in found for name in sample.terms})
    matrix = np.array([[s.terms.get(n, 0.0) / s.ms for n in names] for s in found])
    say = np.array([1.0 if s.heads == heads else OTHER_CLASSES for s in found])
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    weight, ones = say, np.ones(len(found))
    for _ in range(ROUNDS):  # towards the least absolute error: some calls stay unlike the rest
        x, _ = nnls(matrix / scale * weight[:, None], weight)
        weight = say / np.sqrt(np.maximum(np.abs(matrix / scale @ x - ones), LEAST_ERROR))
    return {name: float(value) for name, value in zip(names, x / scale, strict=True) if value > 0}


# ---- rows left out -------------------------------------------------------------------------------


class Regret(NamedTuple):
    """Say what a choice costs: times of what it takes over the best, sorted.

    Attributes:
        forward, both: of forwards alone, and of forward and backward together.
    """

    forward: np.ndarray
    both: np.ndarray

    def line(self, of: str) -> str:
        """Say the median, the 95th percentile and the worst."""
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
    """

    errors: dict[tuple[str, str], np.ndarray]
    predicted: dict[tuple[int, str, str], float]

    @property
    def median(self) -> float:
        """The median relative error of all."""
        return float(np.median(np.concatenate(list(self.errors.values()))))


def left_out(found: list[Sample], folds: int = FOLDS) -> LeftOut:
    """Predict each row by weights that are fitted on the rows of other folds."""
    folds = min(folds, len({s.row for s in found}))
    errors: dict[tuple[str, str], list[float]] = {}
    predicted = {}
    for fold in range(folds):
        weights = fitted(s for s in found if s.row % folds != fold)
        for s in (s for s in found if s.row % folds == fold):
            if (key := (s.kernel, s.what, s.heads)) not in weights:
                continue
            ms = weighed(weights[key], s.terms)
            predicted[s.row, s.kernel, s.what] = ms
            errors.setdefault((s.kernel, s.what), []).append(abs(ms / s.ms - 1))
    return LeftOut({key: np.sort(x) for key, x in errors.items()}, predicted)


def regret(rows: Sequence[GridRow], choose: Chooser) -> Regret:
    """Return what a choice costs on measured rows.

    Args:
        rows: of a grid.
        choose: of each row and pass.
    """
    forward, both = [], []
    for row in rows:
        times = {what: _ours(row.times[what]) for what in (FORWARD, BACKWARD)}
        if not all(times.values()):
            continue
        taken = [times[what][choose(row, what)] for what in times]
        best = [min(times[what].values()) for what in times]
        forward.append(taken[0] / best[0])
        both.append(sum(taken) / sum(best))
    return Regret(np.sort(forward), np.sort(both))


def _ours(times: dict[str, float]) -> dict[str, float]:
    return {name: ms for name, ms in times.items() if is_ours(name)}


def by_prediction(rows: Sequence[GridRow], predicted: dict[tuple[int, str, str], float]) -> Chooser:
    """Take the smallest of predicted times."""
    at = {id(row): i for i, row in enumerate(rows)}

    def choose(row: GridRow, what: str) -> str:
        known = [n for n in _ours(row.times[what]) if (at[id(row)], n, what) in predicted]
        return min(known, key=lambda name: predicted[at[id(row)], name, what])

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


def measured_shape(row: GridRow) -> MeasuredShape:
    """Return a row as the table holds a shape."""
    b, t, s, n, _, h = row.call.sizes
    forward, backward = (fastest_first(_ours(row.times[what])) for what in (FORWARD, BACKWARD))
    return MeasuredShape((b, t, s, n, h), mask_kind(call_of(row)), forward, backward)


def call_of(row: GridRow) -> Call:
    """Return a row's call as a plan takes it."""
    return row.call.shape().call()


class Fit(NamedTuple):
    """Hold fitted costs and what they are worth.

    Attributes:
        costs: fitted on all rows.
        text: errors and regrets of rows left out, for people.
    """

    costs: FittedCosts
    text: str


def fit(rows: Sequence[GridRow], device: Device, folds: int = FOLDS) -> Fit:
    """Fit costs, and compare them with the nearest measured shape on rows left out.

    Args:
        rows: of a grid.
        device: that they were measured on.
        folds: in how many parts the rows are left out.
    """
    found, folds = samples(rows, device), min(folds, len(rows))
    out = left_out(found, folds)
    at = {id(row): i for i, row in enumerate(rows)}

    def other_folds(row: GridRow) -> list[GridRow]:
        return [other for other in rows if at[id(other)] % folds != at[id(row)] % folds]

    mine = regret(rows, by_prediction(rows, out.predicted))
    theirs = regret(rows, by_nearest(rows, other_folds))
    decides = (
        mine.both.mean() <= theirs.both.mean() and mine.forward.mean() <= theirs.forward.mean()
    )
    lines = [
        f"{name} {what}: {len(x)} times, median error {np.median(x):.1%}, 95% "
        f"{np.quantile(x, 0.95):.1%}, worst {x[-1]:.1%}"
        for (name, what), x in out.errors.items()
    ]
    lines += [mine.line("regret of the smallest prediction")]
    lines += [theirs.line("regret of the nearest measured shape")]
    head = f"{len(rows)} calls, each predicted by weights fitted without it ({folds} folds)"
    made = FittedCosts(fitted(found), out.median, len(rows), bool(decides))
    return Fit(made, "\n".join([head, *lines]))
