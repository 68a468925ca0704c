"""Measure block by block whether a streamed video still shows the digit of its prompt.

digit      share of the block's frames in which the classifier names it
direction  whether its mean movement per frame rounds to the prompt's
phase      pixels between its place and the one that the first frame and the prompt imply
ink        its ink, as a share of the mean ink of scans of the digit
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from . import judge, torus
from .scenes import Size
from .torus import INK, SIDE, Scans
from .words import ALL, STEPS

Videos = Float[np.ndarray, "n F H W"]
HALF = 0.5  # pixels a frame: movements nearer to the prompt's than this round to it
FIRST, LAST, DIRECTION, INK_OFF = 0.97, 0.90, 0.98, 0.10
SOON, SHARE, AFTER = 3, 0.90, 0.95  # blocks until a new digit is there; its bars
HEAD = "  block   digit  direction  phase     ink"


@dataclass(frozen=True)
class Drift:
    """One number per block, over all videos.

    Args:
        digit, direction: shares of correct frames, and of correct videos.
        phase: mean distance in pixels from the place that the first frame and the prompt imply.
        ink: share of the scans' mean ink.
    """

    digit: tuple[float, ...]
    direction: tuple[float, ...]
    phase: tuple[float, ...]
    ink: tuple[float, ...]

    @property
    def values(self) -> dict[str, tuple[float, ...]]:
        """The four tuples by name."""
        return asdict(self)

    @property
    def bars(self) -> dict[str, bool]:
        """Return which bars the videos pass; a failure of any is visible to a viewer."""
        return {
            f"digit in block 1 at least {FIRST:.0%}": self.digit[0] >= FIRST,
            f"digit in the last block at least {LAST:.0%}": self.digit[-1] >= LAST,
            f"direction in every block at least {DIRECTION:.0%}": min(self.direction) >= DIRECTION,
            f"ink in every block within {INK_OFF:.0%}": all(
                abs(x - 1) <= INK_OFF for x in self.ink
            ),
        }

    def table(self, blocks: Sequence[int] | None = None) -> str:
        """Format a table of some blocks, by default all."""
        chosen = range(len(self.digit)) if blocks is None else blocks
        rows = (
            f"  {b + 1:>5}  {self.digit[b]:>6.1%}  {self.direction[b]:>9.1%}"
            f"  {self.phase[b]:>5.2f}  {self.ink[b]:>6.1%}"
            for b in chosen
        )
        return "\n".join([HEAD, *rows])


class TorusJudge:
    """Judge streamed videos.

    Args:
        canvas: pixels along a side.
        speed: pixels that a digit moves in a frame.
    """

    def __init__(self, canvas: int, speed: int) -> None:
        self.speed, self.size, scans = speed, Size(1, canvas, canvas, SIDE), Scans.of("train")
        self.layers = judge.fitted(scans, SIDE)
        ink = INK * scans.ink.sum((-1, -2))
        ends = zip(scans.first, scans.first[1:], strict=False)
        self.ink = np.array([ink[first:last].mean() for first, last in ends])

    def measure(self, videos: Videos, prompts: Sequence[str], block: int) -> Drift:
        """Judge videos, ink from 0 to 16, in blocks of `block` frames."""
        digits, ways = (np.array(x) for x in zip(*(ALL[p] for p in prompts), strict=True))
        steps, logs = self.speed * STEPS[ways].astype(np.float64), self.named(videos)
        off, ink = _off(videos, steps), videos.sum((-1, -2)) / self.ink[digits][:, None]
        by_block = [
            (
                np.mean(logs[:, own].sum(1).argmax(-1) == digits),
                np.mean(_moves_right(videos, own, steps)),
                off[:, own].mean(),
                ink[:, own].mean(),
            )
            for at in range(0, videos.shape[1], block)
            for own in [slice(at, at + block)]
        ]
        return Drift(*(tuple(map(float, numbers)) for numbers in zip(*by_block, strict=True)))

    def named(self, videos: Videos) -> Float[np.ndarray, "n F 10"]:
        """Return the log-probabilities of the ten digits in every frame."""
        ink = torus.unrolled(videos)[:, None] / INK
        total, at = ink.sum((-1, -2)) + 1e-6, np.arange(self.size.height)
        middles = [jnp.asarray((ink.sum(axis) * at).sum(-1) / total) for axis in (-1, -2)]
        cuts = judge.cut(jnp.asarray(ink), middles, self.size)
        return np.asarray(judge.name(self.layers, cuts).logs[:, 0])


def _moves_right(
    videos: Videos, own: slice, steps: Float[np.ndarray, "n 2"]
) -> Bool[np.ndarray, " n"]:
    """Check whether each video moves in its prompt's direction, from the frame before the block."""
    centres = torus.centre(videos[:, max(own.start - 1, 0) : own.stop])
    moved = torus.apart(np.diff(centres, axis=1), videos.shape[-1]).mean(axis=1)
    return (np.abs(moved - steps) < HALF).all(-1)


def _off(videos: Videos, steps: Float[np.ndarray, "n 2"]) -> Float[np.ndarray, "n F"]:
    """Return each digit's distance from the place that the first frame and the prompt imply."""
    centres, frames = torus.centre(videos), np.arange(videos.shape[1])
    wanted = centres[:, :1] + frames[:, None] * steps[:, None]
    return np.linalg.norm(torus.apart(centres - wanted, videos.shape[-1]), axis=-1)


# ---- videos whose prompt changes to another digit ------------------------------------------------


@dataclass(frozen=True)
class Switched:
    """The drift of videos before and after a change of prompt to another digit.

    Two scans on one path have different centres of ink. So in the block after the change the
    direction is computed from that block's frames alone, and phase includes the difference.

    Args:
        at: number of blocks before the change.
        first, second: drift from the first prompts, and from the second ones, in all blocks.
    """

    at: int
    first: Drift
    second: Drift

    @classmethod
    def of(
        cls, told: TorusJudge, videos: Videos, prompts: Sequence[Sequence[str]], at: int, block: int
    ) -> Switched:
        """Judge videos by the prompts before and after the change."""
        first, second = (told.measure(videos, some, block) for some in prompts)
        alone = told.measure(videos[:, at * block :], prompts[1], block)
        ways = (*second.direction[:at], *alone.direction)
        return cls(at, first, Drift(**second.values | {"direction": ways}))

    @property
    def asked(self) -> Drift:
        """The drift in each block from the prompt that the block was sampled with."""
        pairs = zip(self.first.values.items(), self.second.values.values(), strict=True)
        return Drift(**{key: x[: self.at] + y[self.at :] for (key, x), y in pairs})

    @property
    def bars(self) -> dict[str, bool]:
        """Return which bars the videos pass."""
        before, late = self.first.digit[: self.at], self.second.digit[self.at + SOON - 1 :]
        ways = self.second.direction[self.at :]
        return {
            f"first digit before the switch at least {SHARE:.0%}": min(before) >= SHARE,
            f"second digit from block {SOON} after it at least {SHARE:.0%}": min(late) >= SHARE,
            f"direction after it at least {AFTER:.0%}": min(ways) >= AFTER,
        }


def bars_as_text(bars: dict[str, bool]) -> str:
    """Format which bars are passed."""
    return "\n".join(f"  {'pass' if ok else 'FAIL'}  {name}" for name, ok in bars.items())
