"""How much longer kernels took on real TPUs than their estimates, by chip.

The points and their sources are in tests/tools/estimate/published; a test compares these numbers
with them. Estimates are printed as they are, with this beside them.
"""

from __future__ import annotations

from typing import NamedTuple


class MeasuredTimes(NamedTuple):
    """Measured times of kernels, as multiples of their estimates' slow ends: the least, the median
    and the largest, and the number of kernels.
    """

    least: float
    usual: float
    most: float
    points: int


MEASURED = {
    "TPU v6e": MeasuredTimes(1.11, 1.11, 1.12, 3),
    "TPU v7x": MeasuredTimes(1.17, 1.2, 1.31, 19),
}


def beside_measured(device_kind: str) -> str:
    """Return how measured times compare with a device's estimates, as text."""
    chip = device_kind.removeprefix("TPU ")
    if (found := MEASURED.get(device_kind)) is None:
        return f"no kernel was measured on {chip}"
    times = f"{found.least:.2f} to {found.most:.2f} times their slow ends, median {found.usual:.2f}"
    return f"{found.points} kernels measured on {chip} took {times}"
