"""Holds numbers against those of others, each to a part of its own scale, and prints the largest
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def hold(
    what: str, got: Mapping[str, Any], want: Mapping[str, Any], part: float, least: float = 0.0
) -> None:
    """Hold every array against the one of its name; `pytest -s` shows the line.

    Args:
        what: they are, for the line and the error.
        got: ours.
        want: theirs.
        part: of the largest of theirs that a number may be off.
        least: a scale, for arrays that are zero but for rounding.
    """
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    off = {name: distance(got[name], want[name], least) for name in want}
    worst = max(off, key=lambda name: off[name])
    print(f"{what}: at most {off[worst]:.1e} of the scale{f' ({worst})' if len(off) > 1 else ''}")
    assert all(value <= part for value in off.values()), {
        name: value for name, value in off.items() if value > part
    }


def distance(got: Any, want: Any, least: float = 0.0) -> float:
    """Return the largest difference over the largest of `want`; not finite where a number is
    not.
    """
    assert got.shape == want.shape, (got.shape, want.shape)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / max(np.abs(want).max(), least))
