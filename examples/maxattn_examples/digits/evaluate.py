"""Judges drawn videos: a classifier of real digits names the digit, the ink tells the direction.

The judge never saw the model. It is judged too, on real digits that neither it nor the model was
fitted on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from .settings import DataSettings
from .videos import DigitVideos, load
from .words import DIRECTIONS, SIDE, all_prompts

Videos = Float[np.ndarray, "n F H W"]

NEAR = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))  # rows and columns


@dataclass(frozen=True)
class Score:
    """The counts of a group's videos that show the right digit, and the right direction.

    Args:
        videos: how many there are.
        digit, direction: how many of them are right.
    """

    videos: int
    digit: int
    direction: int

    def __str__(self) -> str:
        digit, direction = (
            f"{n:>4}/{self.videos} {n / self.videos:6.1%}" for n in (self.digit, self.direction)
        )
        return f"digit {digit}   direction {direction}"


class Judge:
    """Name the digit and the direction of videos.

    Each frame is cut to the 8x8 pixels around its centre of ink, a support vector machine scores
    the ten digits, and the scores of all frames are summed.

    Args:
        data: sizes of the videos that it will see.
    """

    def __init__(self, data: DataSettings) -> None:
        from sklearn.svm import SVC

        self.data = data
        scans, labels = load("train")
        frames = np.pad(scans, ((0, 0), (SIDE, SIDE), (SIDE, SIDE))).astype(np.float64)
        # The centre of ink may round to a neighbouring pixel, so each digit is learned at all five.
        cuts = np.concatenate([around_ink(frames, off) for off in NEAR])
        # The stub of SVC knows gamma as a word only.
        machine = SVC(C=10.0, gamma=0.001)  # pyright: ignore[reportArgumentType]
        self._machine = machine.fit(cuts, np.tile(labels, len(NEAR)))

    def digits(self, videos: Videos) -> Int[np.ndarray, " n"]:
        """Name the digit that each video shows."""
        frames = videos.reshape(-1, *videos.shape[2:])
        scores = self._machine.decision_function(around_ink(frames)).reshape(*videos.shape[:2], 10)
        return scores.sum(axis=1).argmax(axis=-1)

    def directions(self, videos: Videos) -> list[str]:
        """Name the direction in which the centre of ink moves from the first frame to the last."""
        centres = centre_of_ink(videos)
        return [_direction(*moved) for moved in centres[:, -1] - centres[:, 0]]

    def right(
        self, videos: Videos, prompts: Sequence[str]
    ) -> tuple[Bool[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
        """Return for each video whether its digit, and its direction, are the prompt's."""
        wanted = [all_prompts()[prompt] for prompt in prompts]
        digit = self.digits(videos) == np.array([digit for digit, _ in wanted])
        pairs = zip(self.directions(videos), wanted, strict=True)
        return digit, np.array([found == direction for found, (_, direction) in pairs])

    def score(self, videos: Videos, prompts: Sequence[str]) -> Score:
        """Count the videos that show what their prompts say."""
        digit, direction = self.right(videos, prompts)
        return Score(len(videos), int(digit.sum()), int(direction.sum()))

    def score_of_real(self) -> Score:
        """Judge real digits that were kept aside, each moving once in every direction."""
        videos = DigitVideos(self.data.replace(held_out=()), "test")
        paths = len(self.data.paths)
        # Another path each time, so that all are seen.
        chosen = [i * paths + i % paths for i in range(len(videos) // paths)]
        frames = np.stack([videos.frames(i) for i in chosen]).astype(np.float64)
        return self.score(frames, [videos.prompt(i) for i in chosen])


def scores(
    judge: Judge, videos: Videos, prompts: Sequence[str], held_out: Collection[str]
) -> dict[str, Score]:
    """Judge all videos, those of prompts that were trained on, and those of the others.

    Args:
        judge: fitted.
        videos: ink from 0 to 16.
        prompts: one of the forty for each video.
        held_out: the prompts that were never trained on.
    """
    never = np.array([prompt in held_out for prompt in prompts])
    groups = {"all prompts": never | ~never, "trained on": ~never, "never trained on": never}

    def score(group: Bool[np.ndarray, " n"]) -> Score:
        return judge.score(videos[group], [prompts[int(i)] for i in np.flatnonzero(group)])

    return {name: score(group) for name, group in groups.items() if group.any()}


def as_text(found: dict[str, Score]) -> str:
    """Write scores as a table."""
    return "\n".join(f"  {name:<18}{score}" for name, score in found.items())


def as_values(found: dict[str, Score]) -> dict[str, dict[str, int]]:
    """Return scores as plain values."""
    return {name: asdict(score) for name, score in found.items()}


def centre_of_ink(frames: Float[np.ndarray, "... H W"]) -> Float[np.ndarray, "... 2"]:
    """Return row and column of the centre of ink; of an empty frame, its middle."""
    ink = frames + 1e-6
    rows, columns = np.arange(frames.shape[-2]), np.arange(frames.shape[-1])
    both = (ink.sum(-1) * rows).sum(-1), (ink.sum(-2) * columns).sum(-1)
    return np.stack(both, axis=-1) / ink.sum((-1, -2))[..., None]


def around_ink(
    frames: Float[np.ndarray, "n H W"], off: tuple[int, int] = (0, 0)
) -> Float[np.ndarray, "n 64"]:
    """Cut each frame to 8x8 pixels around its centre of ink, `off` rows and columns further."""
    corners = np.round(centre_of_ink(frames) - (SIDE - 1) / 2).astype(int) + np.array(off)
    corners = corners.clip(0, np.array(frames.shape[1:]) - SIDE)
    cuts = [f[r : r + SIDE, c : c + SIDE] for f, (r, c) in zip(frames, corners, strict=True)]
    return np.stack(cuts).reshape(len(frames), SIDE * SIDE)


def _direction(rows: float, columns: float) -> str:
    left, right, up, down = DIRECTIONS
    if abs(rows) > abs(columns):
        return down if rows > 0 else up
    return right if columns > 0 else left
