"""What predicted times leave over, taken from measured calls like the one that is asked for.

A sum of terms knows nothing of a library's own choices: another tile for short calls, a slow path
of one head dim. Calls that are near each other share them. So the logarithm of measured over
predicted times is interpolated between measured calls (kernel ridge regression), with a weight that
falls by e over `reach` doublings; far from all of them nothing is corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2
from typing import Any

import numpy as np

from maxattn.call import Call
from maxattn.kernels.auto.tile_work import positions_of

APART = 1.5  # doublings that masks of two kinds, and the head dim's own, count as
Shares = Mapping[tuple[str, str], np.ndarray]


@dataclass(frozen=True, eq=False)
class NearCalls:
    """Hold measured calls, and how much each says of a kernel's pass.

    Args:
        reach: in doublings.
        points: [calls, coordinates], from `coordinates`.
        shares: [calls] for each kernel and pass.
    """

    reach: float
    points: np.ndarray
    shares: Shares = field(default_factory=dict)

    @lru_cache(maxsize=64)  # noqa: B019 - both passes of all kernels ask for the same few calls
    def alike(self, call: Call) -> np.ndarray:
        """Return how near each measured call is: [calls]."""
        return likeness(np.array([coordinates(call)]), self.points, self.reach)[0]

    def factor(self, kernel: str, what: str, alike: np.ndarray) -> float:
        """Return what a predicted time is multiplied by.

        Args:
            kernel: its name.
            what: "forward" or "backward".
            alike: from `alike`, of the call.
        """
        shares = self.shares.get((kernel, what))
        return 1.0 if shares is None else float(np.exp(alike @ shares))

    def to_json(self) -> dict[str, Any]:
        """Return it as a file holds it: a line of text each, of numbers."""
        shares: dict[str, dict[str, str]] = {}
        for (kernel, what), numbers in self.shares.items():
            shares.setdefault(kernel, {})[what] = _line(numbers)
        return {"reach": self.reach, "points": [_line(x) for x in self.points], "shares": shares}

    @staticmethod
    def of_json(row: Mapping[str, Any]) -> NearCalls:
        """Read it back."""
        shares = {
            (kernel, what): _numbers(line)
            for kernel, passes in row["shares"].items()
            for what, line in passes.items()
        }
        return NearCalls(row["reach"], np.array([_numbers(x) for x in row["points"]]), shares)


def _line(numbers: np.ndarray) -> str:
    return " ".join(f"{x:.4g}" for x in numbers)


def _numbers(line: str) -> np.ndarray:
    return np.array([float(x) for x in line.split()])


def likeness(mine: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """Return [mine, others]: 1 for the same call, less with the distance."""
    apart = mine[:, None] - others[None]
    return np.exp(-np.sqrt((apart**2).sum(axis=-1)) / reach)


@lru_cache(maxsize=4096)
def coordinates(call: Call) -> tuple[float, ...]:
    """Return where a call stands among others: doublings of its sizes, and the kind of its mask."""
    sizes = call.q_len, call.kv_len, call.batch * call.heads
    # Kernels that were measured pad both head dims to the larger.
    dim = max(call.head_dim, call.value_dim)
    heads = APART * log2(dim), APART * (call.heads != call.kv_heads)
    return *map(log2, sizes), *heads, *(APART * is_kind for is_kind in _kinds(call))


def _kinds(call: Call) -> tuple[bool, ...]:
    """Say whether a mask has arrays of keys, ids, one side of a band, both, or other positions."""
    positions = positions_of(call.mask)
    band = positions.band()
    of_keys = [term.is_of_keys for term in call.mask.terms() if term.has_data]
    is_band = band is not None and not positions.is_full
    return (
        any(of_keys),
        not all(of_keys),
        is_band and band is not None and band.left is None,
        is_band and band is not None and band.left is not None,
        band is None,
    )


def fitted(reach: float, ridge: float, points: np.ndarray, left_over: np.ndarray) -> np.ndarray:
    """Return the shares of measured calls.

    Args:
        reach: in doublings.
        ridge: how little one call says alone: the share of its left-over time that is chance.
        points: [n, coordinates].
        left_over: [n], the logarithm of measured over predicted times.
    """
    alike = likeness(points, points, reach)
    return np.linalg.solve(alike + ridge * np.eye(len(points)), left_over)
