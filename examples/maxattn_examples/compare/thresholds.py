"""Thresholds of step caches from dense runs: the smallest that reuses as many steps as asked.

MagCache's and TeaCache's schedules are computed, and are those of a run. A cache that decides in
each step is replayed over the dense numbers. That is an approximation: in a run a step that reuses
changes the samples, and what later steps decide by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maxattn_examples.fast.cache_settings import (
    COMPUTE,
    DECIDING,
    REUSE,
    EasyCacheSettings,
    FirstBlockSettings,
    MagCacheSettings,
    TeaCacheSettings,
)
from maxattn_examples.fast.curves import LeftOut
from maxattn_examples.fast.schedules import FEW, magcache
from maxattn_examples.fast.teacache import teacache

from .curve import Dense, Some

CALIBRATED = "magcache", "teacache", *DECIDING
IN_A_ROW = 2, 4, 6  # steps that MagCache reuses: the first number that suffices
DEGREE = 4  # of TeaCache's polynomials
Settings = dict[str, Any]
Letters = Callable[[float], Sequence[str]]  # schedules of a threshold, one for each call


class Found(NamedTuple):
    """What a cache reuses at a threshold.

    Args:
        settings: of the cache.
        letters: of each call that decides apart.
    """

    settings: Settings
    letters: Sequence[str]


def find(dense: Dense, share: float) -> dict[str, Found]:
    """Return settings of each cache that compute a share of the steps, at most.

    A cache is left out if no threshold does: it may have more first and last steps than that.

    Args:
        dense: numbers of dense runs.
        share: of the steps.
    """
    found: dict[str, Found] = {}
    for kind, settings, letters in _caches(dense):
        if kind not in found and (at := smallest(letters, share)) is not None:
            found[kind] = Found({"threshold": at, **settings}, letters(at))
    return found


def left_out(dense: Dense, found: Mapping[str, Found]) -> dict[str, LeftOut]:
    """Return the caches of which nothing was found, and why.

    Args:
        dense: numbers of dense runs.
        found: of them; none in fewer steps than caches take.
    """
    why: dict[str, LeftOut] = dict.fromkeys((x for x in CALIBRATED if x not in found), "share")
    if len(dense.ratios) < FEW:
        return dict.fromkeys(why, "steps")
    if "teacache" in why and polynomial(dense) is None:
        why["teacache"] = "times"
    return why


def smallest(letters: Letters, share: float) -> float | None:
    """Return the smallest threshold whose schedules compute a share of the steps, at most.

    It has few digits, rounded up. None if no threshold does.

    Args:
        letters: the schedules of a threshold.
        share: of the steps.
    """

    def enough(threshold: float) -> bool:
        every = "".join(letters(threshold))
        return every.count(COMPUTE) <= share * len(every) + 1e-9

    low, high = 1e-6, 1e6
    if not enough(high):
        return None
    for _ in range(60):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if enough(middle) else (middle, high)
    rounded = (float(f"{high * (1 + 10.0**-n):.{n + 1}g}") for n in range(3, 9))
    return next((x for x in rounded if enough(x)), high)


def polynomial(dense: Dense) -> tuple[float, ...] | None:
    """Fit the change of predictions to that of the embedding of times, as TeaCache does.

    Returns:
        Coefficients, of the highest power first; None if the embedding is not of the time alone, or
        if there are too few steps.
    """
    inputs, outputs = [], []
    for own, states in zip(dense.spans, dense.times or (), strict=False):
        of_times, predicted = Changes([*states]), Changes(dense.predictions)
        for i in range(1, len(states)):
            inputs.append(of_times.relative(i, i - 1))
            outputs.append(predicted.relative(own.start + i, own.start + i - 1))
    if len(set(inputs)) <= DEGREE + 1:
        return None
    return tuple(float(f"{x:.9g}") for x in np.polyfit(inputs, outputs, DEGREE))


class Changes:
    """Means of |a_i - a_j| of the steps' arrays, each computed once."""

    def __init__(self, arrays: Sequence[Some | None]) -> None:
        self._arrays = arrays
        self._known: dict[tuple[int, int | None], float] = {}

    def size(self, i: int) -> float:
        """Return the mean of |a_i|."""
        return self._mean(i, None)

    def between(self, i: int, j: int) -> float:
        """Return the mean of |a_i - a_j|."""
        return self._mean(i, j)

    def relative(self, i: int, j: int) -> float:
        """Return the mean of |a_i - a_j| over that of |a_j|."""
        return self.between(i, j) / self.size(j)

    def _mean(self, i: int, j: int | None) -> float:
        if (i, j) not in self._known:
            x = np.asarray(self._arrays[i], np.float64)
            of = 0.0 if j is None else np.asarray(self._arrays[j], np.float64)
            self._known[i, j] = float(np.abs(x - of).mean())
        return self._known[i, j]


def _caches(dense: Dense) -> Iterator[tuple[str, Settings, Letters]]:
    """Yield settings of each cache beside the threshold, and the schedules of a threshold."""
    for most in IN_A_ROW:
        yield "magcache", {"most": most, "retained": 0.2}, _magcache(dense, most)
    if (fitted := polynomial(dense)) is not None:
        settings = {"polynomial": list(fitted), "input": "embedding"}
        yield "teacache", settings, _teacache(dense, fitted)
    how = FirstBlockSettings()
    settings = {"blocks": how.blocks, "first": how.first, "last": how.last}
    yield "first_block", settings, _first_block(dense, how)
    easy = EasyCacheSettings(first=max(2, round(0.2 * min(map(len, dense.spans)))))
    yield "easycache", {"first": easy.first, "last": easy.last}, _easycache(dense, easy)


def _magcache(dense: Dense, most: int) -> Letters:
    def letters(threshold: float) -> list[str]:
        how = MagCacheSettings(ratios=(1.0,), threshold=threshold, most=most, retained=0.2)
        return ["".join(magcache(dense.ratios[x.start : x.stop], how) for x in dense.spans)]

    return letters


def _teacache(dense: Dense, fitted: tuple[float, ...]) -> Letters:
    def letters(threshold: float) -> list[str]:
        how = TeaCacheSettings(polynomial=fitted, threshold=threshold)
        return ["".join(teacache(own, how) for own in dense.times or ())]

    return letters


def _first_block(dense: Dense, how: FirstBlockSettings) -> Letters:
    """Replay each call: a step is compared with the last one that computed."""
    calls = [(x, Changes(x)) for x in dense.first.values()]

    def replayed(arrays: Sequence[Some | None], changes: Changes, threshold: float) -> str:
        letters = ""
        for own in dense.spans:
            last: int | None = None
            for i in own:
                if arrays[i] is None:  # a step without this call
                    last = None
                    continue
                ends = last is None or i < own.start + how.first or i >= own.stop - how.last
                if last is None or ends or changes.relative(i, last) >= threshold:
                    letters, last = letters + COMPUTE, i
                else:
                    letters += REUSE
        return letters

    return lambda threshold: [replayed(*call, threshold) for call in calls]


def _easycache(dense: Dense, how: EasyCacheSettings) -> Letters:
    """Replay: the changes that are expected of the prediction add up until a step computes."""
    x, v = Changes(dense.samples), Changes(dense.predictions)

    def letters(threshold: float) -> list[str]:
        found = ""
        for own in dense.spans:
            last, rate, error = own.start, np.inf, 0.0
            for i in own:
                ends = i < own.start + how.first or i >= own.stop - how.last
                if i > own.start:
                    error += rate * x.between(i, i - 1) / v.size(last)
                if not ends and error < threshold:
                    found += REUSE
                    continue
                if i > own.start:
                    rate = v.between(i, last) / x.between(i, last)
                found, last, error = found + COMPUTE, i, 0.0
        return [found]

    return letters
