"""Real handwritten digits: scikit-learn's `load_digits`, 1,797 scans of 8 x 8 pixels."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

SIDE = 8  # pixels along a side of a scan
INK = 16.0  # the darkest value of a scan
Split = Literal["train", "test"]


def load(split: Split) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Load scans and their labels: every fifth is for "test", the others are for "train"."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    kept = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return scans[kept].reshape(-1, SIDE, SIDE).astype(np.uint8), labels[kept]


class Scans(NamedTuple):
    """Handwritten digits, in the order of their labels.

    Args:
        ink: 0 to 1.
        first: number of each label's first scan, and one more.
    """

    ink: Float[np.ndarray, "n 8 8"]
    first: Int[np.ndarray, " 11"]

    @classmethod
    def of(cls, split: Split) -> Scans:
        """Load those of a split: "train", or "test", which no model was trained on."""
        scans, labels = load(split)
        first = np.cumsum([0, *np.bincount(labels, minlength=10)])
        return cls((scans[np.argsort(labels, kind="stable")] / INK).astype(np.float32), first)
