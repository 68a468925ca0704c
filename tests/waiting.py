"""Choose the cases of a test for `make test`; the others run only in `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest


def but(cases: Iterable[Any], kept: Callable[[Any], bool] | Sequence[Any]) -> list[Any]:
    """Mark every case slow except the given ones: a list, or a function of a case.

    A tuple is the values of several arguments.
    """
    keep = kept if callable(kept) else lambda case: case in kept
    cases = list(cases)
    assert any(keep(case) for case in cases), "one at least runs in make test"
    return [case if keep(case) else _slow(case) for case in cases]


def enough(cases: Sequence[dict[str, Any]], *pairs: tuple[str, str]) -> list[dict[str, Any]]:
    """Choose cases, greedily and always the same, in which every value of each axis occurs.

    Every pair of values of the named pairs of axes that any case has occurs too.
    """
    wanted = [_found(case, pairs) for case in cases]
    left, kept = set[Hashable]().union(*wanted), []
    while left:
        best = max(range(len(cases)), key=lambda i: len(wanted[i] & left))
        kept.append(cases[best])
        left -= wanted[best]
    return kept


def few(cases: Sequence[dict[str, Any]], *pairs: tuple[str, str]) -> list[Any]:
    """Mark every case slow except those of `enough`."""
    return but(cases, enough(cases, *pairs))


def slow(cases: Iterable[Any]) -> list[Any]:
    """Mark every case slow."""
    return [_slow(case) for case in cases]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def _found(case: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> set[Hashable]:
    named = {axis: (axis, repr(value)) for axis, value in case.items()}
    return {*named.values(), *((named[a], named[b]) for a, b in pairs)}
