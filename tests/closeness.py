"""Compare arrays within a tolerance of each array's scale, and print the largest difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def hold(
    what: str, got: Mapping[str, Any], want: Mapping[str, Any], part: float, least: float = 0.0
) -> None:
    """Compare arrays by name; `pytest -s` shows the printed line.

    Args:
        what: the comparison's name, for the line and the error.
        got: ours.
        want: theirs.
        part: tolerance, relative to the largest entry of `want`.
        least: a smallest scale, for arrays that are zero except for rounding.
    """
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    off = {name: distance(got[name], want[name], least) for name in want}
    worst = max(off, key=lambda name: off[name])
    print(f"{what}: at most {off[worst]:.1e} of the scale{f' ({worst})' if len(off) > 1 else ''}")
    assert all(value <= part for value in off.values()), {
        name: value for name, value in off.items() if value > part
    }


def distance(got: Any, want: Any, least: float = 0.0) -> float:
    """Return the largest difference over the largest of `want`; infinite or NaN if a number is."""
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), least))
