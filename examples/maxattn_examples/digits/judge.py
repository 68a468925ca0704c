"""Find the digits of a clip: their places, which digits they are, and how they move.

Digits of a clip have different colours: a pixel belongs to the digit of the most similar colour. A
classifier names the square around the centre of a digit's ink. The expected places are not used, so
sampled clips and real ones are judged alike.

The classifier has three layers, fitted in a few seconds to clean scans at random places. The
outputs of its second layer are the features for the Frechet distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from . import scenes
from .scenes import BOUNCING, CROSSING, GONE, LEAVING, MOST, NONE, Clips, Scene, Size
from .torus import Scans
from .words import COLOURS, STEPS

CUT = 16  # samples along a side of a cut-out square
WIDE = 1.25  # sides of a digit along a side of it
LIKE = 0.85  # cosine of a pixel and the colour that it belongs to
DARK = 0.2  # brightness of a pixel that belongs to nothing
LEAST = 0.06  # least ink of a visible digit, as a share of its square
VISIBLE = 0.5  # share of its largest ink, in a frame in which a digit is visible
ENDS = 2  # frames at each end, before and after a digit is hidden


class Seen(NamedTuple):
    """The digits found in clips.

    Args:
        ink: of each digit in each frame, in pixels.
        centre: row and column of the centre of its ink.
        cut: the square around that centre.
        stray: share of ink in colours that the prompt does not name.
    """

    ink: Float[Array, "B K F"]
    centre: Float[Array, "B K F 2"]
    cut: Float[Array, "B K F 16 16"]
    stray: Float[Array, " B"]


@partial(jax.jit, static_argnames="size")
def look(clips: Clips, scene: Scene, size: Size) -> Seen:
    """Find the digits of the prompts in clips.

    Args:
        clips: colours from 0 to 1.
        scene: gives the colours to look for.
    """
    colours = jnp.asarray(np.array(list(COLOURS.values()), np.float32))[scene.colour]
    bright = clips.max(-1) * (clips.max(-1) > DARK)
    unit = clips / (jnp.linalg.norm(clips, axis=-1, keepdims=True) + 1e-6)
    to = colours / jnp.linalg.norm(colours, axis=-1, keepdims=True)
    like = jnp.einsum("bfhwc,bkc->bkfhw", unit, to, precision=jax.lax.Precision.HIGHEST)
    like = jnp.where(scene.there[..., None, None, None], like, -1.0)
    own = (like == like.max(1, keepdims=True)) & (like > LIKE)
    ink = own * bright[:, None]
    total = ink.sum((-1, -2))
    middles = [
        (ink.sum(axis) * jnp.arange(n)).sum(-1) / (total + 1e-6)
        for axis, n in ((-1, size.height), (-2, size.width))
    ]
    every = bright.sum((1, 2, 3))
    stray = (every - ink.sum((1, 2, 3, 4))) / (every + 1e-6)
    return Seen(total, jnp.stack(middles, -1), cut(ink, middles, size), stray)


def cut(
    ink: Float[Array, "B K F H W"], middles: list[Array], size: Size
) -> Float[Array, "B K F 16 16"]:
    """Cut out the squares around the centres, interpolated linearly between pixels."""
    offsets = (jnp.arange(CUT) - (CUT - 1) / 2) * WIDE * size.digit / CUT
    weights = [
        jnp.maximum(0, 1 - jnp.abs((middle[..., None] + offsets)[..., None] - jnp.arange(n)))
        for middle, n in zip(middles, (size.height, size.width), strict=True)
    ]
    exact = jax.lax.Precision.HIGHEST
    return jnp.einsum("bkfih,bkfhw,bkfjw->bkfij", weights[0], ink, weights[1], precision=exact)


def visible(ink: Float[np.ndarray, "B K F"], size: Size) -> Bool[np.ndarray, "B K F"]:
    """Return in which frames each digit is visible, nearly whole."""
    most = ink.max(-1, keepdims=True)
    return (ink >= VISIBLE * most) & (most > LEAST * size.digit**2)


def moves_as_told(
    seen: Seen, shown: Bool[np.ndarray, "B K F"], scene: Scene, size: Size
) -> Bool[np.ndarray, "B K"]:
    """Return which digits move on their prompt's path, in its direction.

    One that leaves must be invisible in the middle of the clip and visible at both ends; one that
    crosses must end far from its first place; one that bounces must be visible in the middle.
    """
    ink, centre = np.asarray(seen.ink), np.asarray(seen.centre)
    path, step = np.asarray(scene.path), STEPS[np.asarray(scene.way)]
    t, middle = np.arange(size.frames), (size.frames - 1) / 2
    gone = np.abs(t - middle) < GONE * middle
    share = ink[..., gone].mean(-1) / (ink.max(-1) + 1e-6)
    ends = shown[..., 0] & shown[..., -1]
    early = np.maximum(1, (shown & (t < middle)).cumprod(-1).sum(-1) - 1)
    later = np.take_along_axis(centre, early[..., None, None], axis=2)[:, :, 0]
    begun = ((later - centre[:, :, 0]) * step).sum(-1)
    across = ((centre[:, :, -1] - centre[:, :, 0]) * step).sum(-1)
    far = (np.abs(step) * size.room).sum(-1)
    right = {
        LEAVING: ends & (share < 0.25) & (begun > 0),
        CROSSING: ends & (across > 0.5 * far),
        BOUNCING: shown[..., 0] & (share > 0.25) & (begun > 0),
    }
    return np.select([path == kind for kind in right], list(right.values()), False)


# ---- which digit it is: a classifier that never saw the video model ------------------------------

WIDTHS = (CUT**2, 256, 64, 10)
PLACES = 4  # of each scan
UPDATES, BATCH, RATE = 400, 256, 3e-3
SURE = 0.95  # of a label; the others share the rest, so that no frame counts too much
Layers = list[tuple[Array, Array]]


class Named(NamedTuple):
    """The classifier's outputs for squares.

    Args:
        features: outputs of the second layer.
        logs: log-probabilities of the ten digits.
    """

    features: Float[Array, "... 64"]
    logs: Float[Array, "... 10"]


@jax.jit
def name(layers: Layers, cuts: Float[Array, "... 16 16"]) -> Named:
    """Classify squares."""
    x = 4.0 * cuts.reshape(*cuts.shape[:-2], -1) - 1.0
    exact = jax.lax.Precision.HIGHEST
    for kernel, bias in layers[:-1]:
        x = jax.nn.gelu(jnp.matmul(x, kernel, precision=exact) + bias)
    kernel, bias = layers[-1]
    return Named(x, jax.nn.log_softmax(jnp.matmul(x, kernel, precision=exact) + bias))


def clean(scans: Scans, digit: int, seed: int) -> tuple[Float[Array, "n 16 16"], Int[Array, " n"]]:
    """Draw every scan alone at a random place, and cut it out; return squares and labels."""
    count, size = len(scans.ink), Size(1, 2 * digit, 2 * digit, digit)
    for_place, for_colour = jax.random.split(jax.random.key(seed))
    numbers = jnp.broadcast_to(jnp.arange(count)[:, None], (count, MOST))
    labels = jnp.searchsorted(jnp.asarray(scans.first), numbers, side="right") - 1
    path = jnp.where(jnp.arange(MOST) == 0, BOUNCING, NONE) + 0 * numbers
    start = jax.random.uniform(for_place, (count, MOST, 2)) * jnp.asarray(size.room)
    colour = jax.random.randint(for_colour, (count, MOST), 0, len(COLOURS))
    still = jnp.zeros_like(start)
    scene = Scene(path != NONE, colour, labels, path, 0 * labels, numbers, start, still)
    drawn = scenes.render(scene, scenes.scans_here(scans), size)
    return look(drawn, scene, size).cut[:, 0, 0], labels[:, 0]


def fitted(scans: Scans, digit: int, seed: int = 0) -> Layers:
    """Fit the classifier.

    Args:
        scans: training data.
        digit: pixels along a side of a digit, in clips.
    """
    pairs = [clean(scans, digit, seed + place) for place in range(PLACES)]
    cuts, labels = (jnp.concatenate(parts) for parts in zip(*pairs, strict=True))
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS))
    shapes = zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    layers = [
        (jax.random.normal(key, (wide, out)) * (2 / wide) ** 0.5, jnp.zeros(out))
        for key, wide, out in shapes
    ]
    return _fit(layers, cuts, labels, keys[-1])


@partial(jax.jit, donate_argnums=0)
def _fit(layers: Layers, cuts: Array, labels: Array, key: Array) -> Layers:
    optimizer = optax.adamw(optax.cosine_decay_schedule(RATE, UPDATES), weight_decay=1e-2)

    def loss(layers: Layers, cuts: Array, labels: Array) -> Array:
        wanted = optax.smooth_labels(jax.nn.one_hot(labels, WIDTHS[-1]), 1 - SURE)
        return -(wanted * name(layers, cuts).logs).sum(-1).mean()

    def step(carry: tuple[Layers, optax.OptState], key: Array) -> tuple[tuple, None]:
        layers, moments = carry
        some, for_noise, for_light = jax.random.split(key, 3)
        chosen = jax.random.randint(some, (BATCH,), 0, len(cuts))
        light = jax.random.uniform(for_light, (BATCH, 1, 1), minval=0.7)
        noisy = cuts[chosen] * light + 0.1 * jax.random.normal(for_noise, (BATCH, *cuts.shape[1:]))
        slope = jax.grad(loss)(layers, noisy, labels[chosen])
        change, moments = optimizer.update(slope, moments, layers)
        return (optax.apply_updates(layers, change), moments), None

    begin = layers, optimizer.init(layers)
    return jax.lax.scan(step, begin, jax.random.split(key, UPDATES))[0][0]


def accuracy(layers: Layers, scans: Scans, digit: int, seed: int = 99) -> float:
    """Return the share of scans that the classifier names correctly."""
    cuts, labels = clean(scans, digit, seed)
    return float(np.mean(np.asarray(name(layers, cuts).logs.argmax(-1) == labels)))


# ---- scores of clips -----------------------------------------------------------------------------
# One number per clip, so that ways of sampling are compared clip by clip.
#
#     digit       share of the prompt's digits that the classifier names
#     likelihood  log-probability of the prompt's digit, averaged over frames
#     margin      its difference from that of the most likely other digit
#     identity    share of hidden digits that are the same digit before and after
#     kept        correlation of a hidden digit's squares before and after
#     path        share of digits that move as the prompt says
#     stray       ink of colours that the prompt does not name
#     flicker     mean difference of neighbouring frames
#
# A digit is hidden if it leaves, or crosses another one. For a digit that is never visible all
# digits count as equally likely, and identity and path as failed.

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
    def layers(self) -> Layers:
        """The classifier, fitted to the scans that the video model was trained on."""
        return fitted(Scans.of("train"), self.size.digit, self.seed)

    @cached_property
    def accuracy(self) -> float:
        """The share of held-out scans that the classifier names correctly."""
        return accuracy(self.layers, Scans.of("test"), self.size.digit)

    def score(self, clips: Clips, scene: Scene) -> Scored:
        """Score clips.

        Args:
            clips: colours from 0 to 1.
            scene: the digits and movements of their prompts.
        """
        seen = look(clips, scene, self.size)
        named = name(self.layers, seen.cut)
        there: Any = np.asarray(scene.there)
        path = np.asarray(scene.path)
        shown = visible(np.asarray(seen.ink), self.size) & there[..., None]
        logs = np.where(shown[..., None], np.asarray(named.logs, np.float64), UNSEEN)
        before = _ends(shown, slice(0, ENDS))
        after = _ends(shown, slice(-ENDS, None))
        hidden = there & (path != BOUNCING)
        right = moves_as_told(seen, shown, scene, self.size)
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
