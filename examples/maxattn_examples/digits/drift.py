"""Measures streamed digits block by block: whether a long video still shows its digit.

digit      a classifier of real digits names it in the frames of the block
direction  its mean movement a frame rounds to the pixels of the prompt
phase      pixels between where it is and where the first frame and the prompt put it
ink        its ink, as a share of what scans of the digit have
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from . import torus
from .evaluate import Judge, Videos
from .videos import load
from .words import STEPS, all_prompts

HALF = 0.5  # pixels a frame: movements nearer to the prompt's than this round to it


@dataclass(frozen=True)
class Drift:
    """A number for each block, over all videos.

    Args:
        digit, direction: shares that are right.
        phase: mean pixels off the place that the first frame and the prompt say.
        ink: share of the scans' ink.
    """

    digit: tuple[float, ...]
    direction: tuple[float, ...]
    phase: tuple[float, ...]
    ink: tuple[float, ...]

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        """The numbers by name."""
        return asdict(self)

    def rows(self, blocks: Sequence[int]) -> list[str]:
        """Write some blocks, the first one being 0, as lines of a table."""
        return [
            f"  {b + 1:>5}  {self.digit[b]:>6.1%}  {self.direction[b]:>9.1%}"
            f"  {self.phase[b]:>5.2f}  {self.ink[b]:>6.1%}"
            for b in blocks
        ]


HEAD = "  block   digit  direction  phase     ink"


def measure(judge: Judge, videos: Videos, prompts: Sequence[str], size: int) -> Drift:
    """Judge streamed videos.

    Args:
        judge: fitted.
        videos: ink from 0 to 16, whole blocks.
        prompts: one of the forty for each video.
        size: frames of a block.
    """
    wanted = [all_prompts()[prompt] for prompt in prompts]
    digits = np.array([digit for digit, _ in wanted])
    steps = judge.data.speed * np.array([STEPS[way] for _, way in wanted], np.float64)
    blocks = [slice(at, at + size) for at in range(0, videos.shape[1], size)]
    middle, off = torus.unrolled(videos), _off(videos, steps)
    ink = videos.sum((-1, -2)) / _ink_of_scans()[digits][:, None]
    by_block = [
        (
            np.mean(judge.digits(middle[:, own]) == digits),
            np.mean(_moves_right(videos, own, steps)),
            off[:, own].mean(),
            ink[:, own].mean(),
        )
        for own in blocks
    ]
    return Drift(*(tuple(map(float, numbers)) for numbers in zip(*by_block, strict=True)))


def _moves_right(
    videos: Videos, own: slice, steps: Float[np.ndarray, "n 2"]
) -> Bool[np.ndarray, " n"]:
    """Check whether each video moves as its prompt says, from the frame before the block."""
    centres = torus.centre(videos[:, max(own.start - 1, 0) : own.stop])
    moved = torus.apart(np.diff(centres, axis=1), videos.shape[-1]).mean(axis=1)
    return (np.abs(moved - steps) < HALF).all(-1)


def _off(videos: Videos, steps: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n F"]:
    """Return how far each frame's digit is from where the first frame and the prompt put it."""
    centres, frames = torus.centre(videos), np.arange(videos.shape[1])
    wanted = centres[:, :1] + frames[:, None] * steps[:, None]
    return np.linalg.norm(torus.apart(centres - wanted, videos.shape[-1]), axis=-1)


def _ink_of_scans() -> Float[np.ndarray, " 10"]:
    """Return the mean ink of the scans of each digit."""
    scans, labels = load("train")
    ink = scans.sum((-1, -2))
    return np.array([ink[labels == digit].mean() for digit in range(10)])


# ---- bars ----------------------------------------------------------------------------------------

FIRST, LAST, DIRECTION, INK = 0.97, 0.90, 0.98, 0.10
SETTLED = 5  # blocks before the ones that are looked at for a trend
SIGMAS = 2.0


def slope(numbers: Sequence[float]) -> tuple[float, float]:
    """Fit a line; return its slope a block and the standard error of that."""
    y, x = np.asarray(numbers, np.float64), np.arange(len(numbers), dtype=np.float64)
    x -= x.mean()
    found = (x * y).sum() / (x**2).sum()
    rest = y - y.mean() - found * x
    error = np.sqrt((rest**2).sum() / max(len(y) - 2, 1) / (x**2).sum())
    return float(found), float(error)


def bars(drift: Drift) -> dict[str, bool]:
    """Return which bars a rollout passes; a viewer would see each of them."""
    found = {
        f"digit in block 1 at least {FIRST:.0%}": drift.digit[0] >= FIRST,
        f"digit in the last block at least {LAST:.0%}": drift.digit[-1] >= LAST,
        f"direction in every block at least {DIRECTION:.0%}": min(drift.direction) >= DIRECTION,
        f"ink in every block within {INK:.0%}": all(abs(ink - 1) <= INK for ink in drift.ink),
    }
    for name in ("digit", "ink") if len(drift.digit) > SETTLED + 2 else ():
        trend, error = slope(drift.values[name][SETTLED:])
        key = f"no trend of {name} from block {SETTLED + 1} on"
        found[key] = abs(trend) <= SIGMAS * error or trend == 0
    return found


def as_text(drift: Drift, blocks: Sequence[int] | None = None) -> str:
    """Write a table of some blocks, by default of all."""
    chosen = range(len(drift.digit)) if blocks is None else blocks
    return "\n".join([HEAD, *drift.rows(chosen)])


def bars_as_text(found: dict[str, bool]) -> str:
    """Write which bars are passed."""
    return "\n".join(f"  {'pass' if ok else 'FAIL'}  {name}" for name, ok in found.items())


def as_values(found: dict[str, Drift]) -> dict[str, Any]:
    """Return the numbers of several rollouts as plain values."""
    return {name: drift.values for name, drift in found.items()}
