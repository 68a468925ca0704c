"""Score clips, with one number per clip, so that ways of sampling are compared clip by clip.

    digit       share of the prompt's digits that the classifier names
    likelihood  log-probability of the prompt's digit, averaged over frames
    margin      its difference from that of the most likely other digit
    identity    share of hidden digits that are the same digit before and after
    kept        correlation of a hidden digit's squares before and after
    path        share of digits that move as the prompt says
    stray       ink of colours that the prompt does not name
    flicker     mean difference of neighbouring frames

A digit is hidden if it leaves, or crosses another one. For a digit that is never visible all digits
count as equally likely, and identity and path as failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from . import judge
from .scenes import BOUNCING, Clips, Scene, Size
from .torus import Scans

# 1 if larger scores are better, -1 if smaller ones are.
BETTER = {
    "digit": 1, "likelihood": 1, "margin": 1, "identity": 1, "kept": 1, "path": 1, "stray": -1,
}  # fmt: skip
Scores = dict[str, Float[np.ndarray, " B"]]
UNSEEN = float(np.log(0.1))


@dataclass(frozen=True)
class Scored:
    """The scores of clips.

    Args:
        scores: by name, one number per clip.
        features: the classifier's, for every digit in every frame in which it is visible.
    """

    scores: Scores
    features: Float[np.ndarray, "n 64"]


@dataclass(frozen=True)
class Judge:
    """Score clips of one size.

    Args:
        seed: of the classifier's fit.
    """

    size: Size
    seed: int = 0

    @cached_property
    def layers(self) -> judge.Layers:
        """The classifier, fitted to the scans that the video model was trained on."""
        return judge.fitted(Scans.of("train"), self.size.digit, self.seed)

    @cached_property
    def accuracy(self) -> float:
        """The share of held-out scans that the classifier names correctly."""
        return judge.accuracy(self.layers, Scans.of("test"), self.size.digit)

    def score(self, clips: Clips, scene: Scene) -> Scored:
        """Score clips.

        Args:
            clips: colours from 0 to 1.
            scene: the digits and movements of their prompts.
        """
        seen = judge.look(clips, scene, self.size)
        named = judge.name(self.layers, seen.cut)
        there: Any = np.asarray(scene.there)
        path = np.asarray(scene.path)
        shown = judge.visible(np.asarray(seen.ink), self.size) & there[..., None]
        logs = np.where(shown[..., None], np.asarray(named.logs, np.float64), UNSEEN)
        before = _ends(shown, slice(0, judge.ENDS))
        after = _ends(shown, slice(-judge.ENDS, None))
        hidden = there & (path != BOUNCING)
        right = judge.moves_as_told(seen, shown, scene, self.size)
        found = {
            **_of_digits(logs, shown, np.asarray(scene.digit), there),
            "identity": _mean(_same(logs, before, after), hidden),
            "kept": _mean(_correlation(np.asarray(seen.cut), before, after), hidden),
            "path": _mean(right, there),
            "stray": np.asarray(seen.stray, np.float64),
            "flicker": flicker(np.asarray(clips)),
        }
        return Scored(found, np.asarray(named.features, np.float64)[shown])


def flicker(clips: Float[np.ndarray, "B F H W C"]) -> Float[np.ndarray, " B"]:
    """Return the mean difference of neighbouring frames."""
    return np.abs(np.diff(clips.astype(np.float64), axis=1)).mean((1, 2, 3, 4))


def _of_digits(logs: np.ndarray, shown: np.ndarray, digit: np.ndarray, there: np.ndarray) -> Scores:
    """Return digit, likelihood and margin, from log-probabilities averaged over visible frames."""
    count = np.maximum(1, shown.sum(-1))[..., None]
    seen: Any = shown.any(-1)
    logs = np.where(seen[..., None], (logs * shown[..., None]).sum(2) / count, UNSEEN)
    own = np.take_along_axis(logs, digit[..., None], -1)[..., 0]
    others = np.where(np.arange(10) == digit[..., None], -np.inf, logs).max(-1)
    margin = own - others
    return {
        "digit": _mean(margin > 0, there),
        "likelihood": _mean(own, there),
        "margin": _mean(margin, there),
    }


def _ends(shown: Bool[np.ndarray, "B K F"], frames: slice) -> Bool[np.ndarray, "B K F"]:
    """Return in which of these frames each digit is visible."""
    chosen = np.zeros_like(shown)
    chosen[..., frames] = shown[..., frames]
    return chosen


def _same(logs: np.ndarray, before: np.ndarray, after: np.ndarray) -> Bool[np.ndarray, "B K"]:
    """Return which digits are classified alike before and after."""
    named = [(logs * some[..., None]).sum(2).argmax(-1) for some in (before, after)]
    return (named[0] == named[1]) & before.any(-1) & after.any(-1)


def _correlation(
    cut: np.ndarray, before: np.ndarray, after: np.ndarray
) -> Float[np.ndarray, "B K"]:
    """Correlate a digit's mean squares before and after; 0 if it is not visible."""
    means = []
    for some in (before, after):
        total = (cut.astype(np.float64) * some[..., None, None]).sum(2)
        mean = (total / np.maximum(1, some.sum(-1))[..., None, None]).reshape(*some.shape[:2], -1)
        mean = mean - mean.mean(-1, keepdims=True)
        means.append(mean / (np.linalg.norm(mean, axis=-1, keepdims=True) + 1e-9))
    return (means[0] * means[1]).sum(-1)


def _mean(values: np.ndarray, of: Bool[np.ndarray, "B K"]) -> Float[np.ndarray, " B"]:
    return (values * of).sum(-1) / np.maximum(1, of.sum(-1))
