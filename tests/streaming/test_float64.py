"""In float64, with attention written in numpy: a ring by `slots` sees what the mask allows.

Nothing of maxattn computes here but `Stream`: its slots, and its mask as a table.
"""

from __future__ import annotations

import numpy as np
import pytest

import maxattn as ma
from tests.pairwise import product
from tests.streaming.test_equivalence import AXES, fits, frames_of, name, stream_of

WIDTH, LAYERS = 6, 2


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
    scores = q @ k.T
    scores = scores if allowed is None else np.where(allowed, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)) @ v


def turn(x: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Rotate channels 0 and 1, and 2 and 3, by the number of the frame."""
    y = x.copy()
    for pair, rate in ((0, 0.3), (2, 0.05)):
        c, s = np.cos(rate * frame), np.sin(rate * frame)
        a, b = x[:, pair], x[:, pair + 1]
        y[:, pair], y[:, pair + 1] = a * c - b * s, a * s + b * c
    return y


class Layer:
    """One layer of projections and a tanh, on tokens with a time."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v, self.out = rng.normal(size=(4, WIDTH, WIDTH)) / WIDTH**0.5

    def project(self, x: np.ndarray, time: np.ndarray, frame: np.ndarray) -> tuple[np.ndarray, ...]:
        x = x * (1 + time[:, None])
        return turn(x @ self.q, frame), turn(x @ self.k, frame), x @ self.v

    def after(self, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
        return x + np.tanh(seen @ self.out)


NET = [Layer(i) for i in range(LAYERS)]


def by_mask(stream: ma.Stream, clean: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Run both clips at once under the table of the mask."""
    tokens = len(clean)
    frames = tokens // stream.tokens_per_frame
    at = np.arange(2 * tokens)
    table = stream.teacher_mask(frames).bind(2 * tokens, 2 * tokens).allowed(at, at)[0, 0]
    frame = np.tile(np.arange(tokens) // stream.tokens_per_frame, 2)
    x, time = np.concatenate([clean, noisy]), np.repeat([0.0, 0.7], tokens)
    for layer in NET:
        x = layer.after(x, attend(*layer.project(x, time, frame), np.asarray(table)))
    return x


def by_slots(stream: ma.Stream, clean: np.ndarray, noisy: np.ndarray) -> np.ndarray:
    """Run block by block, with a dictionary of slots for each layer."""
    size = stream.tokens_per_frame
    kept: list[dict[int, tuple[np.ndarray, np.ndarray]]] = [{} for _ in NET]
    out = np.empty((2, *clean.shape))
    for start, stop in stream.blocks(len(clean) // size):
        own = slice(start * size, stop * size)
        frame = np.repeat(np.arange(start, stop), size)
        for half, (x, time) in enumerate(((noisy[own], 0.7), (clean[own], 0.0))):
            for layer, slots in zip(NET, kept, strict=True):
                q, k, v = layer.project(x, np.full(len(x), time), frame)
                for n, i in enumerate(range(start, stop)):
                    part = slice(n * size, (n + 1) * size)
                    slots[stream.slots(i)] = k[part], v[part]
                keys, values = (np.concatenate(y) for y in zip(*slots.values(), strict=True))
                x = layer.after(x, attend(q, keys, values, None))
            out[1 - half, own] = x
        assert len(kept[0]) <= (stream.budget or stop)
    return np.concatenate(out)


@pytest.mark.parametrize("case", product(AXES, fits), ids=name)
def test_a_ring_sees_what_the_mask_allows(case: dict) -> None:
    stream = stream_of(case)
    rng = np.random.default_rng(1)
    clean, noisy = rng.normal(size=(2, frames_of(stream) * stream.tokens_per_frame, WIDTH))
    want = by_mask(stream, clean, noisy)
    np.testing.assert_allclose(by_slots(stream, clean, noisy), want, rtol=0, atol=1e-12)
