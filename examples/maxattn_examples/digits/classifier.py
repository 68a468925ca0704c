"""Names handwritten digits in squares that `judge.look` cuts out; it never saw the video model.

Three layers, fitted to clean scans at random places in a few seconds. Its second layer's values are
the features whose distributions a Frechet distance compares.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from . import judge, scenes
from .scans import Scans
from .scenes import BOUNCING, MOST, NONE, Scene, Size
from .words import COLOURS

WIDTHS = (judge.CUT**2, 256, 64, 10)
PLACES = 4  # of each scan
STEPS, BATCH, RATE = 400, 256, 3e-3
SURE = 0.95  # of a label; the others share the rest, so that no frame counts too much
Layers = list[tuple[Array, Array]]


class Named(NamedTuple):
    """What the classifier says of squares.

    Args:
        features: of its second layer.
        logs: logarithms of the ten digits' probabilities.
    """

    features: Float[Array, "... 64"]
    logs: Float[Array, "... 10"]


@jax.jit
def name(layers: Layers, cuts: Float[Array, "... 16 16"]) -> Named:
    """Name the digits of squares."""
    x = 4.0 * cuts.reshape(*cuts.shape[:-2], -1) - 1.0
    exact = jax.lax.Precision.HIGHEST
    for kernel, bias in layers[:-1]:
        x = jax.nn.gelu(jnp.matmul(x, kernel, precision=exact) + bias)
    kernel, bias = layers[-1]
    return Named(x, jax.nn.log_softmax(jnp.matmul(x, kernel, precision=exact) + bias))


def clean(scans: Scans, digit: int, seed: int) -> tuple[Float[Array, "n 16 16"], Int[Array, " n"]]:
    """Cut every scan out of a frame of its own, at a random place; return squares and labels."""
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
    return judge.look(drawn, scene, size).cut[:, 0, 0], labels[:, 0]


def fitted(scans: Scans, digit: int, seed: int = 0) -> Layers:
    """Fit the classifier.

    Args:
        scans: that it learns from.
        digit: pixels along a side of a digit, in clips.
        seed: of everything.
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
    optimizer = optax.adamw(optax.cosine_decay_schedule(RATE, STEPS), weight_decay=1e-2)

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
    return jax.lax.scan(step, begin, jax.random.split(key, STEPS))[0][0]


def accuracy(layers: Layers, scans: Scans, digit: int, seed: int = 99) -> float:
    """Return the share of scans that are named right."""
    cuts, labels = clean(scans, digit, seed)
    return float(np.mean(np.asarray(name(layers, cuts).logs.argmax(-1) == labels)))
