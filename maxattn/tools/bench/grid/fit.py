"""Fit `auto`'s costs to measured rows: weights of terms, and what near calls leave over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from maxattn.call import Call
from maxattn.devices import Device, device_of
from maxattn.kernels import computed_call
from maxattn.kernels.auto import near as near_calls
from maxattn.kernels.auto.cost_terms import BACKWARD, FORWARD, LAUNCH, Terms, terms
from maxattn.kernels.auto.memory_terms import COPIES
from maxattn.kernels.auto.near import NearCalls
from maxattn.kernels.auto.predict import HEAD_CLASSES, FittedCosts, Key, head_class
from maxattn.tools.bench.grid.calls import GridCall
from maxattn.tools.bench.grid.rows import GridRow, is_ours

OTHER_CLASSES = 0.1  # the say of other head dims, where few calls have one's own
ROUNDS, LEAST_ERROR = 6, 0.02
FLOOR = 0.7  # of the shortest measured time: no call is predicted to take less


class Sample(NamedTuple):
    """Hold one measured time.

    Attributes:
        kernel, what, call: whose it is, as the kernel computes it.
        terms: as a plan knows them.
        ms: what was measured.
        row: of the grid.
        fold: a number that the rows of a call share: it may be measured on several devices.
        real: the terms of the lengths or ids that were measured, which no plan knows.
    """

    kernel: str
    what: str
    call: Call
    terms: Terms
    ms: float
    row: int
    fold: int
    real: Terms

    @property
    def key(self) -> Key:
        """Which weights are its."""
        return self.kernel, self.what, head_class(self.call.head_dim)

    def predicted(self, costs: FittedCosts) -> float | None:
        """Return ms by costs; None where they have no weights of it."""
        if self.key not in costs.weights:
            return None
        return costs.weigh_all({self.kernel: self.terms}, self.what, self.call)[self.kernel]

    def explained(self, costs: FittedCosts) -> float:
        """Return ms by costs that have weights of it, of what was measured."""
        return costs.weigh_all({self.kernel: self.real}, self.what, self.call)[self.kernel]


class NearSettings(NamedTuple):
    """Say how calls near a measured one are corrected by it (near.py)."""

    reach: float
    ridge: float


def samples(rows: Sequence[GridRow], device: Device) -> list[Sample]:
    """Return every measured time with its terms, on the device of its row.

    Args:
        rows: of a grid.
        device: of rows that name none.
    """
    folds = fold_numbers(rows)
    each = zip(enumerate(rows), folds, strict=True)
    return [sample for (at, row), n in each for sample in _of_row((at, n), row, device)]


def fold_numbers(rows: Sequence[GridRow]) -> list[int]:
    """Number the calls of rows, for rows of a call to be left out together."""
    numbers: dict[GridCall, int] = {}
    return [numbers.setdefault(row.call, len(numbers)) for row in rows]


def _of_row(at: tuple[int, int], row: GridRow, device: Device) -> Iterator[Sample]:
    call, known = call_of(row), row.call.known
    on = device_of(row.device) if row.device else device
    for of, ms in _times(row):
        its = computed_call(of[0], call, "gpu")
        yield Sample(*of, its, terms(*of, its, on), ms, *at, terms(*of, its, on, known))


def _times(row: GridRow) -> list[tuple[tuple[str, str], float]]:
    return [
        ((name, what), ms)
        for what in (FORWARD, BACKWARD)
        for name, ms in row.times[what].items()
        if is_ours(name)
    ]


def call_of(row: GridRow) -> Call:
    """Return a row's call as a plan takes it."""
    return row.call.shape().call()


def fitted(found: Sequence[Sample], near: NearSettings | None = None) -> FittedCosts:
    """Fit weights that are not negative, by relative error, and what near calls leave over."""
    passes = _by_pass(found)
    weights = {
        (*key, heads): _fit(its, heads) for key, its in passes.items() for heads in HEAD_CLASSES
    }
    costs = FittedCosts(weights)
    return costs if near is None else replace(costs, near=_near(passes, costs, near))


def _by_pass(found: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    passes: dict[tuple[str, str], list[Sample]] = {}
    for sample in found:
        passes.setdefault((sample.kernel, sample.what), []).append(sample)
    return passes


def _near(
    passes: dict[tuple[str, str], list[Sample]], costs: FittedCosts, settings: NearSettings
) -> NearCalls:
    """Interpolate what is left over of each pass, between the calls that it was measured on."""
    calls = dict.fromkeys((s.row, s.call) for its in passes.values() for s in its)
    at = {each: i for i, each in enumerate(calls)}
    points = np.array([near_calls.coordinates(call) for _, call in calls])
    shares = {}
    for key, its in passes.items():
        mine = [at[s.row, s.call] for s in its]
        left_over = np.array([np.log(s.ms / s.explained(costs)) for s in its])
        shares[key] = np.zeros(len(points))
        shares[key][mine] = near_calls.fitted(*settings, points[mine], left_over)
    return NearCalls(settings.reach, points, shares)


def _fit(found: list[Sample], heads: int) -> Terms:
    """Fit one class: its own samples, and the others' with less weight."""
    names = sorted({name for sample in found for name in sample.real} - {COPIES})
    matrix = np.array([[s.real.get(n, 0.0) / s.ms for n in names] for s in found])
    say = np.array([1.0 if s.key[2] == heads else OTHER_CLASSES for s in found])
    scale = np.maximum(matrix.max(axis=0), 1e-12)
    least = FLOOR * min(s.ms for s in found)
    shares = np.array([1 - (least + s.real.get(COPIES, 0.0)) / s.ms for s in found])
    copied = {COPIES: 1.0} if any(COPIES in s.real for s in found) else {}
    weight = say
    for _ in range(ROUNDS):  # towards the least absolute error: some calls stay unlike the rest
        x, _ = nnls(matrix / scale * weight[:, None], shares * weight)
        weight = say / np.sqrt(np.maximum(np.abs(matrix / scale @ x - shares), LEAST_ERROR))
    weights = {n: float(value) for n, value in zip(names, x / scale, strict=True) if value > 0}
    return weights | {"launch": weights.get("launch", 0.0) + least / LAUNCH} | copied
