"""Videos of real handwritten digits that move one pixel a frame in the direction of their prompt.

The digits are scikit-learn's `load_digits`: 1,797 scans of 8x8 pixels, ink from 0 to 16, bundled
with that package. Every video is a function of its index alone and the order of the seed, so a data
iterator resumes from one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import Int, UInt8

from maxattn_examples.common.pictures import to_model

from . import text
from .settings import DataSettings
from .torus import rolled
from .words import SIDE, STEPS, all_prompts, prompt_of

Scan = UInt8[np.ndarray, "8 8"]
Split = Literal["train", "test"]


def load(split: Split) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Load scans and their labels: every fifth is for "test", the others are for "train"."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    kept = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return scans[kept].reshape(-1, SIDE, SIDE).astype(np.uint8), labels[kept]


def move(
    scan: Scan, direction: str, lane: int, end: int, data: DataSettings
) -> UInt8[np.ndarray, "F H W"]:
    """Place a scan on an empty canvas once a frame, each time one pixel further.

    Args:
        scan: the digit.
        direction: left, right, up or down.
        lane: pixels between the upper or left edge and the digit, across the movement.
        end: pixels left between the edge that it moves to and the digit, in the last frame.
        data: how many frames of which size.
    """
    rows, columns = STEPS[direction]
    video = np.zeros((data.frames, data.canvas, data.canvas), np.uint8)
    for frame in range(data.frames):
        ahead = end + data.frames - 1 - frame
        along = ahead if rows + columns < 0 else data.canvas - SIDE - ahead
        row, column = (along, lane) if rows else (lane, along)
        video[frame, row : row + SIDE, column : column + SIDE] = scan
    return video


class DigitVideos:
    """Offer every video (scan x direction x path), except those whose prompts are held out.

    It is a source for grain: `len(source)` and `source[index]`.

    Args:
        data: sizes of the videos, and the prompts that are held out.
        split: which scans.
    """

    def __init__(self, data: DataSettings, split: Split = "train") -> None:
        self.data = data
        self._scans, self._labels = load(split)
        self._pairs = list(self._kept_pairs())
        self._paths = data.paths
        self._tokens = {prompt: text.encode([prompt])[0] for prompt in all_prompts()}

    @cached_property
    def _others(self) -> dict[tuple[int, str], list[int]]:
        """Scans by the digit that they are not, and by a direction that theirs is shown in."""
        return {
            (digit, way): [s for s, its in self._pairs if its == way and self._labels[s] != digit]
            for digit in range(10)
            for way in STEPS
        }

    def _kept_pairs(self) -> Iterator[tuple[int, str]]:
        """Yield each scan with the directions whose prompts are not held out."""
        held_out = self.data.held_out
        kept = [pair for prompt, pair in all_prompts().items() if prompt not in held_out]
        for scan, label in enumerate(self._labels):
            yield from ((scan, direction) for digit, direction in kept if digit == label)

    def __len__(self) -> int:
        return len(self._pairs) * len(self._paths)

    def prompt(self, index: int) -> str:
        """Return the prompt of the video at `index`."""
        scan, direction = self._pairs[index // len(self._paths)]
        return prompt_of(int(self._labels[scan]), direction)

    def frames(self, index: int) -> UInt8[np.ndarray, "F H W"]:
        """Draw the video at `index`, ink from 0 to 16."""
        pair, path = divmod(index, len(self._paths))
        scan, direction = self._pairs[pair]
        place = rolled if self.data.torus else move
        return place(self._scans[scan], direction, *self._paths[path], self.data)

    def before(self, index: int) -> UInt8[np.ndarray, "F H W"]:
        """Draw a scan of another digit on the path of the video at `index`, ink from 0 to 16."""
        pair, path = divmod(index, len(self._paths))
        scan, direction = self._pairs[pair]
        others = self._others[int(self._labels[scan]), direction]
        other = others[int(np.random.default_rng(index).integers(len(others)))]
        place = rolled if self.data.torus else move
        return place(self._scans[other], direction, *self._paths[path], self.data)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = int(index)
        return {"video": to_model(self.frames(index)), "tokens": self._tokens[self.prompt(index)]}
