"""One call of a grid: its sizes and its mask, as a row of a file holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maxattn.call import SHORT_DTYPE
from maxattn.kernels.auto.tile_work import UNKNOWN, Known
from maxattn.masks import (
    BlockSlidingWindow,
    Causal,
    Full,
    KeyPadding,
    LocalWindow,
    Mask,
    Segments,
)
from maxattn.tools.model_shapes import DTYPE_OF, Shape

FULL, CAUSAL, WINDOW, BLOCKS = "full", "causal", "window", "block window"
LENGTHS, SEGMENTS, OF_LENGTHS = "lengths", "segments", "segments of lengths"
KINDS = (FULL, CAUSAL, WINDOW, BLOCKS, LENGTHS, SEGMENTS, OF_LENGTHS)


@dataclass(frozen=True)
class GridCall:
    """Hold one call that is measured.

    Args:
        sizes: B, T, S, N, K, H.
        dtype: "bf16" or "f16".
        kind: of the mask, one of `KINDS`.
        numbers: of the mask: left and right of a window; block and blocks of a block window; a
            length for each batch row; tokens of each segment.
    """

    sizes: tuple[int, int, int, int, int, int]
    dtype: str = "bf16"
    kind: str = FULL
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Spell it in a line."""
        b, t, s, n, k, h = self.sizes
        heads = f"{n}" if n == k else f"{n}/{k}"
        mask = "" if self.kind == FULL else f" {self.kind}{self._short_numbers()}"
        return f"{b},{t},{s},{heads},{h} {self.dtype}{mask}"

    def _short_numbers(self) -> str:
        shown = " ".join(map(str, self.numbers[:2]))
        return f" {shown}{' ...' if len(self.numbers) > 2 else ''}" if self.numbers else ""

    @property
    def pairs(self) -> float:
        """Pairs of queries and keys of all heads, those that the mask forbids included."""
        b, t, s, n, _, _ = self.sizes
        return float(b * t * s * n)

    @property
    def known(self) -> Known:
        """What the lengths or the ids of the mask leave."""
        if self.kind == LENGTHS:
            return Known(sum(self.numbers) / len(self.numbers) / self.sizes[2])
        if self.kind == SEGMENTS:
            return Known(ids=Segments.of_lengths(self.numbers).bind(*self.sizes[1:3]))
        return UNKNOWN

    @property
    def bytes(self) -> float:
        """Bytes of Q, K, V and the output."""
        b, t, s, n, k, h = self.sizes
        return 2.0 * 2 * b * h * (t * n + s * k)

    def mask(self) -> Mask:
        """Make the mask, not bound."""
        if self.kind == LENGTHS:
            return KeyPadding(np.array(self.numbers, np.int32))
        if self.kind == SEGMENTS:
            ids = np.repeat(np.arange(len(self.numbers), dtype=np.int32), self.numbers)
            ids = np.broadcast_to(ids, (self.sizes[0], ids.size))
            return Segments(ids, ids)
        if self.kind == OF_LENGTHS:
            return Segments.of_lengths(self.numbers)
        made = {FULL: Full, CAUSAL: Causal, WINDOW: LocalWindow, BLOCKS: BlockSlidingWindow}
        return made[self.kind](*self.numbers)

    def shape(self) -> Shape:
        """Return it as `bench` takes it."""
        b, t, s, n, k, h = self.sizes
        role = "self" if t == s else "cross"
        return Shape(self.name, b, t, s, n, h, k, role, self.mask(), DTYPE_OF[self.dtype])

    def to_json(self) -> list[Any]:
        """Return it as a row of a file holds it."""
        return [list(self.sizes), self.dtype, self.kind, list(self.numbers)]

    @staticmethod
    def of_json(row: list[Any]) -> GridCall:
        """Read it back."""
        (b, t, s, n, k, h), dtype, kind, numbers = row
        return GridCall((b, t, s, n, k, h), dtype, kind, tuple(numbers))


def of_shape(shape: Shape) -> GridCall:
    """Return a model's shape as a call of a grid: of all pairs, or in a block window."""
    kv_heads, dtype = shape.kv_heads or shape.heads, SHORT_DTYPE[shape.dtype]
    sizes = shape.batch, shape.q_len, shape.kv_len, shape.heads, kv_heads, shape.head_dim
    numbers = tuple(x for x in vars(shape.mask).values() if x is not None)
    found = GridCall(sizes, dtype, BLOCKS if numbers else FULL, numbers)
    assert found.mask() == shape.mask, shape
    return found
