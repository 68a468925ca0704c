"""Videos of real handwritten digits that move one pixel a frame in the direction their prompt names.

The digits are scikit-learn's `load_digits`: 1,797 scans of 8x8 pixels, ink from 0 to 16, bundled with that package.
Every video is a function of its index alone and the order of the seed, so a data iterator resumes from one number.
"""

from __future__ import annotations

from typing import Literal, TypedDict

import grain
import numpy as np
from jaxtyping import Float, Int, UInt8

from . import text
from .settings import DataSettings
from .words import SIDE, STEPS, all_prompts, prompt_of

Scan = UInt8[np.ndarray, "8 8"]
Split = Literal["train", "test"]
Rows = Int[np.ndarray, " rows"]

INK = 16.0  # the darkest value of a scan


class Batch(TypedDict):
    """Hold videos, ink scaled to -1..1, and the token ids of their prompts."""

    video: Float[np.ndarray, "B F H W 1"]
    tokens: Int[np.ndarray, "B S"]


def load(split: Split) -> tuple[UInt8[np.ndarray, "n 8 8"], Int[np.ndarray, " n"]]:
    """Load scans and their labels: every fifth is for "test", the others are for "train"."""
    from sklearn.datasets import load_digits

    scans, labels = load_digits(return_X_y=True)
    kept = (np.arange(len(labels)) % 5 == 4) == (split == "test")
    return scans[kept].reshape(-1, SIDE, SIDE).astype(np.uint8), labels[kept]


def move(scan: Scan, direction: str, lane: int, end: int, data: DataSettings) -> UInt8[np.ndarray, "F H W"]:
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
    """Offer every video there is - scan x direction x place - less those whose prompts are held out.

    It is a source for grain: `len(source)` and `source[index]`.

    Args:
        data: sizes of the videos, and the prompts that are held out.
        split: which scans.
    """

    def __init__(self, data: DataSettings, split: Split = "train") -> None:
        self.data = data
        self._scans, self._labels = load(split)
        kept = [pair for prompt, pair in all_prompts().items() if prompt not in data.held_out]
        self._pairs = [
            (i, direction) for i, label in enumerate(self._labels) for digit, direction in kept if digit == label
        ]
        self._places = [(lane, end) for lane in data.lanes for end in data.ends]
        self._tokens = {prompt: text.encode([prompt])[0] for prompt in all_prompts()}

    def __len__(self) -> int:
        return len(self._pairs) * len(self._places)

    def prompt(self, index: int) -> str:
        """Return the prompt of the video at `index`."""
        scan, direction = self._pairs[index // len(self._places)]
        return prompt_of(int(self._labels[scan]), direction)

    def frames(self, index: int) -> UInt8[np.ndarray, "F H W"]:
        """Draw the video at `index`, ink from 0 to 16."""
        pair, place = divmod(index, len(self._places))
        scan, direction = self._pairs[pair]
        return move(self._scans[scan], direction, *self._places[place], self.data)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = int(index)
        return {"video": to_model(self.frames(index)), "tokens": self._tokens[self.prompt(index)]}


def to_model(frames: UInt8[np.ndarray, "..."]) -> Float[np.ndarray, "... 1"]:
    """Scale ink to -1..1 and add the channel axis."""
    return (frames.astype(np.float32) / (INK / 2) - 1.0)[..., None]


def from_model(video: Float[np.ndarray, "... 1"]) -> Float[np.ndarray, "..."]:
    """Undo `to_model`, clipped to the ink that a scan can have."""
    return np.clip((np.asarray(video)[..., 0] + 1.0) * (INK / 2), 0.0, INK)


class Batches:
    """Offer the batches of a run one after the other, of each the rows that are asked for.

    Args:
        videos: in the order in which they are learned from.
        batch_size: rows of a whole batch.
        rows: those that this process loads.
    """

    def __init__(self, videos: grain.MapDataset, batch_size: int, rows: Rows) -> None:
        self._videos, self._size, self._rows = videos, batch_size, rows

    def __len__(self) -> int:
        return len(self._videos) // self._size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        found = [self._videos[int(index) * self._size + int(row)] for row in self._rows]
        return {key: np.stack([one[key] for one in found]) for key in found[0]}


def batches(data: DataSettings, batch_size: int, seed: int, rows: Rows | None = None) -> grain.DatasetIterator:
    """Shuffle the training videos anew each epoch and batch them, without end.

    Args:
        data: what the videos are.
        batch_size: videos a batch.
        seed: of the order.
        rows: those of each batch that are loaded; default all.

    Returns:
        An iterator over `Batch`, whose place `get_state()` tells: the same on every process.
    """
    source: grain.MapDataset = grain.MapDataset.source(DigitVideos(data))  # pyright: ignore[reportArgumentType]
    videos = source.seed(seed).shuffle().repeat()
    wanted = Batches(videos, batch_size, np.arange(batch_size) if rows is None else rows)
    dataset: grain.MapDataset = grain.MapDataset.source(wanted)  # pyright: ignore[reportArgumentType]
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))
