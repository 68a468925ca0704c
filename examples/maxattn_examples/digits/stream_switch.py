"""Measures videos whose prompt changes to another digit in the middle.

Place and direction go on. The centre of ink of two scans on one path is not the same, so in the
block after the change the direction is that of its own frames, and phase grows by what is between
the two digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import drift
from .drift import Drift
from .evaluate import Judge, Videos
from .words import DIGITS, all_prompts, prompt_of

FURTHER = 3  # digits from the first prompt's to the second one's
SOON, SHARE, DIRECTION = 3, 0.90, 0.95  # blocks until the new digit is there; the bars
HEAD = "  block  first digit  second  direction  phase     ink"


@dataclass(frozen=True)
class Switched:
    """The digits of videos before and after the change.

    Args:
        at: blocks before it.
        first, second: measured by the first prompts, and by the second ones, in all blocks.
    """

    at: int
    first: Drift
    second: Drift

    @property
    def asked(self) -> Drift:
        """Measured in each block by the prompt that it has."""
        both = self.first.values, self.second.values
        return Drift(**{k: x[: self.at] + both[1][k][self.at :] for k, x in both[0].items()})

    @property
    def bars(self) -> dict[str, bool]:
        """Return which bars are passed."""
        late, before = self.second.digit[self.at + SOON - 1 :], self.first.digit[: self.at]
        ways = self.second.direction[self.at :]
        return {
            f"first digit before the switch at least {SHARE:.0%}": min(before) >= SHARE,
            f"second digit from block {SOON} after it at least {SHARE:.0%}": min(late) >= SHARE,
            f"direction after it at least {DIRECTION:.0%}": min(ways) >= DIRECTION,
        }

    def __str__(self) -> str:
        asked, lines = self.asked, [HEAD]
        for b in range(len(asked.digit)):
            if b == self.at:
                lines.append("  ----- another prompt")
            lines.append(
                f"  {b + 1:>5}  {self.first.digit[b]:>11.1%}  {self.second.digit[b]:>6.1%}"
                f"  {asked.direction[b]:>9.1%}  {asked.phase[b]:>5.2f}  {asked.ink[b]:>6.1%}"
            )
        return "\n".join(lines)


def other_digits(prompts: Sequence[str]) -> list[str]:
    """Return prompts of other digits that move alike."""
    pairs = (all_prompts()[prompt] for prompt in prompts)
    return [prompt_of((digit + FURTHER) % len(DIGITS), direction) for digit, direction in pairs]


def measure(
    judge: Judge,
    videos: Videos,
    before: Sequence[str],
    after: Sequence[str],
    size: int,
    at: int,
) -> Switched:
    """Judge videos whose prompt changes.

    Args:
        judge: fitted.
        videos: ink from 0 to 16, whole blocks.
        before, after: the prompts of each video, of the same direction.
        size: frames of a block.
        at: blocks before the change.
    """
    first, second = (drift.measure(judge, videos, prompts, size) for prompts in (before, after))
    alone = drift.measure(judge, videos[:, at * size :], after, size)
    ways = (*second.direction[:at], *alone.direction)
    return Switched(at, first, replace(second, direction=ways))
