"""Choose few cases of a product so that every pair of values of any two axes occurs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def product(axes: Mapping[str, Sequence], legal: Callable[[dict], bool]) -> list[dict]:
    """Return every legal case."""
    cases = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [c for c in cases if legal(c)]


def name_of(case: dict) -> str:
    """Name a case after its values."""
    return "-".join(str(value).replace(" ", "_") for value in case.values())


def pairwise(
    axes: Mapping[str, Sequence],
    legal: Callable[[dict], bool],
    seed: int = 0,
    tries: int = 60,
    core: Sequence[str] | None = None,
) -> list[dict]:
    """Return legal cases, chosen greedily, that cover every pair which any legal case has.

    With `core`, cover only pairs of values of those axes, and every value of the others with every
    value of the first axis: as many cases as the two longest axes of `core` require.
    """
    core = list(axes) if core is None else core
    rng = random.Random(seed)
    names = list(axes)
    wanted = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        if {a, b} <= set(core) or core[0] in (a, b)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    chosen: list[dict] = []
    while wanted:
        seeds = sorted(wanted)
        best, best_pairs = None, set()
        for _ in range(tries):
            (a, i), (b, j) = rng.choice(seeds)
            index = {n: rng.randrange(len(axes[n])) for n in names} | {a: i, b: j}
            if legal({n: axes[n][index[n]] for n in names}):
                pairs = set(itertools.combinations(((n, index[n]) for n in names), 2)) & wanted
                if len(pairs) > len(best_pairs):
                    best, best_pairs = index, pairs
        if best is None:
            wanted -= _impossible(seeds, axes, legal)
            continue
        chosen.append({n: axes[n][best[n]] for n in names})
        wanted -= best_pairs
    return chosen


def plainly(
    cases: Sequence[dict], axis: str, plain: Any, legal: Callable[[dict], bool], core: Sequence[str]
) -> list[dict]:
    """Give each axis its plain value in cases in which that loses no pair of `core`.

    Remove duplicates that this makes.
    """
    found, made = [_pairs(case, core) for case in cases], []
    times = Counter(pair for pairs in found for pair in pairs)
    for case, pairs in zip(cases, found, strict=True):
        other = case | {axis: plain}
        now = _pairs(other, core)
        if legal(other) and all(times[pair] > 1 for pair in pairs - now):
            times.subtract(pairs)
            times.update(now)
            case = other
        made += [] if case in made else [case]
    return made


def _pairs(case: dict, core: Sequence[str]) -> set:
    """Return the pairs of a case that `pairwise` covers with `core`."""
    named = itertools.combinations(case.items(), 2)
    return {(a, b) for a, b in named if {a[0], b[0]} <= set(core) or core[0] in (a[0], b[0])}


def _impossible(pairs, axes, legal) -> set:
    """Find pairs among the first that no legal case has, so that the search can end."""
    gone = set()
    for (a, i), (b, j) in pairs[:8]:
        fixed = {n: [axes[n][i]] if n == a else [axes[n][j]] if n == b else axes[n] for n in axes}
        cases = (dict(zip(axes, v, strict=True)) for v in itertools.product(*fixed.values()))
        if not any(legal(c) for c in cases):
            gone.add(((a, i), (b, j)))
    return gone
