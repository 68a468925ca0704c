"""Draw calls by a seed: every kind of mask, head dim and ratio of lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from maxattn.call import Call
from maxattn.masks import (
    BlockSlidingWindow,
    Causal,
    Full,
    KeyPadding,
    LocalWindow,
    Mask,
    Segments,
)

DTYPES = {"bf16": "bfloat16", "f16": "float16"}
FULL, CAUSAL, WINDOW, BLOCKS = "full", "causal", "window", "block window"
LENGTHS, SEGMENTS, OF_LENGTHS = "lengths", "segments", "segments of lengths"
MASKS_OF = {FULL: Full, CAUSAL: Causal, WINDOW: LocalWindow, BLOCKS: BlockSlidingWindow}


class DrawnCall(NamedTuple):
    """One call, as a row of a file stores it.

    Args:
        sizes: B, T, S, N, K, H.
        dtype: "bf16" or "f16".
        kind: the kind of its mask.
        numbers: the numbers of its mask: left and right of a window; block and window of a block
            window; a length for each batch row; the tokens of each segment.
    """

    sizes: tuple[int, ...]
    dtype: str = "bf16"
    kind: str = FULL
    numbers: tuple[int, ...] = ()

    @staticmethod
    def of_json(row: list[Any]) -> DrawnCall:
        """Read a call from a row of a file."""
        sizes, dtype, kind, numbers = row
        return DrawnCall(tuple(sizes), dtype, kind, tuple(numbers))

    def __str__(self) -> str:
        b, t, s, n, k, h = self.sizes
        heads = f"{n}" if n == k else f"{n}/{k}"
        shown = "".join(f" {x}" for x in self.numbers[:2]) + " ..." * (len(self.numbers) > 2)
        mask = "" if self.kind == FULL else f" {self.kind}{shown}"
        return f"{b},{t},{s},{heads},{h} {self.dtype}{mask}"

    @property
    def pairs(self) -> float:
        """All pairs of queries and keys, over all heads and whatever the mask."""
        b, t, s, n, _, _ = self.sizes
        return float(b * t * s * n)

    @property
    def bytes(self) -> float:
        """Bytes of Q, K, V and the output."""
        b, t, s, n, k, h = self.sizes
        return 2.0 * 2 * b * h * (t * n + s * k)

    def mask(self) -> Mask:
        """Make the mask, bound to the lengths."""
        b, t, s, n, _, _ = self.sizes
        if self.kind == LENGTHS:
            mask = KeyPadding(np.array(self.numbers, np.int32))
        elif self.kind == SEGMENTS:
            ids = np.repeat(np.arange(len(self.numbers), dtype=np.int32), self.numbers)
            mask = Segments(*[np.broadcast_to(ids, (b, ids.size))] * 2)
        elif self.kind == OF_LENGTHS:
            mask = Segments.of_lengths(self.numbers)
        else:
            mask = MASKS_OF[self.kind](*self.numbers)
        return mask.bind(t, s, b, n)

    def call(self) -> Call:
        """Return the call of one device."""
        b, t, s, n, k, h = self.sizes
        role = "self" if t == s else "cross"
        return Call(b, t, s, n, k, h, DTYPES[self.dtype], self.mask().form(), role=role)


Rng = np.random.Generator
# Strata: masks, head dims and ratios of lengths are dealt in these shares, independently.
MASKS = (FULL,) * 9 + (CAUSAL,) * 2 + (WINDOW,) * 2 + (BLOCKS,) * 2
MASKS += (LENGTHS,) * 2 + (SEGMENTS,) + (OF_LENGTHS,) * 2
HEAD_DIMS = (64,) * 6 + (128,) * 6 + (40, 72, 80, 96, 96, 160, 192, 256)
RATIOS = ("square",) * 10 + ("few keys",) * 5 + ("few queries",) * 3 + ("near",) * 2
TEXTS = (77, 226, 256, 257, 333, 512)  # keys of models' texts and images
LEAST, MOST, MOST_ROWS = 64, 131072, 2000
MOST_WORK, MOST_BYTES = 8e12, 6e8  # operations of all pairs; bytes of Q, K, V and the output
MOST_LENGTHS = 64  # batch rows with lengths of their own, since each length is stored
HEADS = (1, 2, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40)


def draw(seed: int, count: int) -> list[DrawnCall]:
    """Return `count` calls, the same ones for a seed on every machine."""
    rng = np.random.default_rng(seed)
    strata = zip(*(_dealt(rng, x, count) for x in (MASKS, HEAD_DIMS, RATIOS)), strict=True)
    return [_call(rng, *stratum) for stratum in strata]


def _dealt(rng: Rng, shares: tuple, count: int) -> list:
    """Draw `count` items without replacement from shuffled copies of `shares`."""
    packs = [
        shares[i] for _ in range(-(-count // len(shares))) for i in rng.permutation(len(shares))
    ]
    return packs[:count]


def _call(rng: Rng, kind: str, head_dim: int, ratio: str) -> DrawnCall:
    """Draw sizes until the call is small enough to be timed quickly."""
    while True:
        (t, s), heads = _lengths(rng, "square" if _is_of_tokens(kind) else ratio), _heads(rng)
        most = _most_batch(t, s, heads[0], head_dim)
        if most < 1:
            continue
        batch = round(_log_uniform(rng, 1, min(most, MOST_LENGTHS) if kind == LENGTHS else most))
        dtype = "f16" if rng.random() < 0.15 else "bf16"
        sizes = batch, t, s, *heads, head_dim
        return DrawnCall(sizes, dtype, kind, _numbers(rng, kind, batch, t, s))


def _is_of_tokens(kind: str) -> bool:
    return kind in (SEGMENTS, OF_LENGTHS, BLOCKS)


def _log_uniform(rng: Rng, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _length(rng: Rng, low: float = LEAST, high: float = MOST) -> int:
    """Draw a length: every other one a multiple of 64."""
    n = round(_log_uniform(rng, low, high))
    return max(64, n // 64 * 64) if rng.random() < 0.5 else n


def _lengths(rng: Rng, ratio: str) -> tuple[int, int]:
    long = _length(rng)
    if ratio == "square":
        return long, long
    if ratio == "near":
        return long, _length(rng, max(LEAST, long // 3), min(MOST, long * 3))
    short = int(rng.choice(TEXTS)) if rng.random() < 0.6 else _length(rng, LEAST, 2048)
    short = min(short, long)
    return (long, short) if ratio == "few keys" else (short, long)


def _heads(rng: Rng) -> tuple[int, int]:
    heads = int(rng.choice(HEADS))
    shared = [g for g in (2, 4, 8) if heads % g == 0]
    grouped = shared and rng.random() < 0.12
    return heads, heads // int(rng.choice(shared)) if grouped else heads


def _most_batch(t: int, s: int, heads: int, head_dim: int) -> int:
    row = DrawnCall((1, t, s, heads, heads, head_dim))
    by_work = MOST_WORK / (4 * row.pairs * head_dim)
    return int(min(by_work, MOST_BYTES / row.bytes, MOST_ROWS / heads))


def _numbers(rng: Rng, kind: str, batch: int, t: int, s: int) -> tuple[int, ...]:
    first = (0,) if t > s else ()  # where the first query sits; else the last is at the last key
    if kind == CAUSAL:
        return first
    if kind == WINDOW:
        left = round(_log_uniform(rng, 32, max(64, s / 2)))
        return left, int(rng.choice((0, left))), *first
    if kind == BLOCKS:
        block = max(1, min(round(_log_uniform(rng, 64, 4096)), s // 2))
        return block, int(rng.integers(1, max(2, -(-s // block))))
    if kind == LENGTHS:
        return tuple(int(x) for x in rng.integers(max(1, s // 8), s + 1, batch))
    return _segments(rng, t) if kind in (SEGMENTS, OF_LENGTHS) else ()


def _segments(rng: Rng, tokens: int) -> tuple[int, ...]:
    """Cut tokens into 2 to 32 segments: equal ones, or of drawn lengths."""
    many = min(round(_log_uniform(rng, 2, 32)), tokens // 16)
    if rng.random() < 0.5:
        cuts = np.arange(1, many) * tokens // many
    else:
        cuts = np.sort(rng.choice(np.arange(1, tokens), many - 1, replace=False))
    ends = [0, *map(int, cuts), tokens]
    return tuple(b - a for a, b in pairwise(ends))
